"""Microbatches that take turns in ``functional_call`` find their own weights, and others the parameters."""

from __future__ import annotations

import torch
from torch import nn

from opensmd.modelparallel.runtime.side_effects.parameters import ParametersPerMicrobatch, ReplacedParameters


def test_a_microbatch_finds_the_parameter_although_another_one_has_replaced_it() -> None:
    module = nn.Linear(2, 2)
    state, weight, other = (
        ParametersPerMicrobatch(ReplacedParameters([module])),
        module.weight,
        torch.ones(2, 2),
    )
    state.begin(0)
    module._parameters["weight"] = other  # type: ignore[assignment]
    state.suspend(0, look=True)
    state.begin(1)
    assert module.weight is weight
    state.suspend(1, look=True)
    state.begin(0)
    assert module.weight is other
    module._parameters["weight"] = weight
    for microbatch in (0, 1):
        state.suspend(microbatch, look=False)
        state.end(microbatch)
    state.end_step()
    assert module.weight is weight


def test_later_steps_know_the_place_without_looking() -> None:
    module = nn.Linear(2, 2)
    replaced, weight = ReplacedParameters([module]), module.weight
    for look in (True, False):
        state = ParametersPerMicrobatch(replaced)
        state.begin(0)
        module._parameters["weight"] = torch.ones(2, 2)  # type: ignore[assignment]
        state.suspend(0, look=look)
        state.begin(1)
        assert module.weight is weight


def test_what_a_script_replaces_for_good_stays_for_the_microbatches_that_follow() -> None:
    module, bias = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    state = ParametersPerMicrobatch(ReplacedParameters([module]))
    state.begin(0)
    module.bias = bias
    del module.weight
    state.suspend(0, look=True)
    state.end(0)
    state.begin(1)
    state.end_step()
    assert module.bias is bias and not hasattr(module, "weight")

"""What smp.DistributedModel refuses before anything has happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opensmd.modelparallel import model_arguments
from opensmd.modelparallel.exceptions import SMPError


@pytest.mark.parametrize(
    ("given", "said"), [(3, "expected a torch.nn.Module, got int"), (nn.Linear, "got type")]
)
def test_what_is_no_module_is_refused(given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        model_arguments.require_model(given)


def test_a_scripted_module_is_refused_and_a_second_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="cannot be distributed; give the plain module"):
        model_arguments.require_model(torch.jit.script(nn.Linear(1, 1)))
    model_arguments.require_model(nn.Linear(1, 1))
    monkeypatch.setattr(model_arguments.state, "model", object())
    with pytest.raises(SMPError, match="only one model of a script"):
        model_arguments.require_model(nn.Linear(1, 1))


def test_parameters_without_values_are_counted_and_one_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"2 of 4 parameters and buffers .* such as '1\.weight'"):
        model_arguments.require_data(model)
    model_arguments.require_data(nn.Linear(2, 2))


def test_times_are_measured_on_the_device_of_the_model_alone() -> None:
    model_arguments.require_tracing("gpu", True)
    with pytest.raises(ValueError, match="must be False with trace_device='cpu'"):
        model_arguments.require_tracing("cpu", True)
    with pytest.raises(ValueError, match="must be 'cpu' or 'gpu', got 'tpu'"):
        model_arguments.require_tracing("tpu", False)


@pytest.mark.parametrize("passes", [0, 1.5, "2"])
def test_a_number_of_passes_is_one(passes: Any) -> None:
    with pytest.raises(ValueError, match="an int of at least 1"):
        model_arguments.require_passes(passes)


@pytest.mark.parametrize(
    ("split", "by_hand", "said"),
    [(True, True, "auto_partition is False"), (False, False, "one partition"), (True, False, None)],
)
def test_measuring_for_no_plan_warns(
    split: bool, by_hand: bool, said: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    model_arguments.warn_of_untraced(split=split, by_hand=by_hand)
    told = [str(each.message) for each in recwarn if each.category is UserWarning]
    assert len(told) == bool(said) and all(said in each for each in told if said)

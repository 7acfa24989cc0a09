"""Optimizer state of a distributed model as the original's, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opensmd.modelparallel.tensor_parallel.huggingface.optimizer_state import fitting_state, original_state
from opensmd.modelparallel.tensor_parallel.huggingface.originals import (
    as_distributed,
    as_original,
    note_original,
    original_of,
    parameters_of_original,
)
from opensmd.modelparallel.tensor_parallel.huggingface.translation import Family, translations_of

WIDTH = 4
FAMILY = Family(
    layers="layer", modules={"output": "output.dense"}, separate=("self.query", "self.key", "self.value")
)


def original() -> nn.Module:
    layer = nn.ModuleDict({"output": nn.Linear(WIDTH, WIDTH)})
    layer["self"] = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("key", "query", "value")})
    return nn.ModuleDict({"layer": nn.ModuleList([layer])})


class Distributed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.ModuleDict({"attention": nn.ModuleDict({"query_key_value": nn.Module()})})
        shapes = {"weight": (3, WIDTH, WIDTH), "bias": (3, WIDTH)}
        for name, shape in shapes.items():
            layer["attention"]["query_key_value"].register_parameter(name, nn.Parameter(torch.ones(shape)))
        layer["output"] = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})
        self.seq_layers = nn.ModuleList([layer])


def model() -> nn.Module:
    """A distributed module between others."""
    made = Distributed()
    note_original(made, original_of(original(), translations_of(FAMILY)))
    return nn.Sequential(nn.Linear(2, 3), made, nn.Linear(3, 2))


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), original(), nn.Linear(3, 2))


def trained(module: nn.Module) -> dict[str, Any]:
    """The state of an Adam over all parameters, whose moments say which parameter's they are."""
    state = {
        number: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(parameter), "kept": None}
        for number, parameter in enumerate(module.parameters())
    }
    return {"state": state, "param_groups": [{"params": list(state), "lr": 0.5}]}


def names_of(module: nn.Module) -> list[list[str]]:
    return [[name for name, _ in module.named_parameters()]]


def moments(state: dict[str, Any], names: list[str]) -> dict[str, torch.Tensor]:
    return {name: state["state"][number]["exp_avg"] for number, name in enumerate(names)}


def test_state_has_the_numbers_and_shapes_of_the_original_and_comes_back() -> None:
    module, plain = model(), plain_model()
    ours, theirs = names_of(module), names_of(plain)
    assert [name for name, _ in parameters_of_original(module)] == theirs[0]
    given = trained(module)
    there = original_state(module, given, ours)
    assert there["param_groups"] == [{"params": list(range(12)), "lr": 0.5, "param_names": theirs[0]}]
    wanted = as_original(module, moments(given, ours[0]))
    found = moments(there, theirs[0])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    steps = [entries["step"] for entries in there["state"].values()]
    assert steps == [3.0] * 12 and len(set(map(id, steps))) == 12  # each counts for itself
    for names in (theirs[0], None):
        if names is None:
            del there["param_groups"][0]["param_names"]
        back = fitting_state(module, there, ours)
        has_names = {} if names is None else {"param_names": ours[0]}
        assert back["param_groups"] == [{**given["param_groups"][0], **has_names}]
        torch.testing.assert_close(back["state"], given["state"], rtol=0.0, atol=0.0)


def test_plain_state_without_names_is_told_by_its_shapes() -> None:
    module, plain = model(), plain_model()
    given = trained(plain)
    found = moments(fitting_state(module, given, names_of(module)), names_of(module)[0])
    wanted = as_distributed(module, moments(given, names_of(plain)[0]))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_state_of_these_parameters_stays_as_it_is() -> None:
    module, plain = model(), plain_model()
    for each in (module, plain):
        given = trained(each)
        assert fitting_state(each, given, names_of(each)) == given
    assert original_state(plain, given, names_of(plain)) == given


def test_named_parameters_may_be_in_other_groups() -> None:
    plain = plain_model()
    names = names_of(plain)[0]
    given = trained(plain)
    given["param_groups"][0]["param_names"] = names
    given["param_groups"].append({"params": [], "param_names": [], "lr": 1.0})
    moved = fitting_state(plain, given, [names[1:], names[:1]])
    assert [group["params"] for group in moved["param_groups"]] == [list(range(11)), [11]]
    assert torch.equal(moved["state"][11]["exp_avg"], given["state"][0]["exp_avg"])


def test_state_that_cannot_be_translated_is_refused_or_left() -> None:
    module = model()
    given = trained(module)
    there = original_state(module, given, names_of(module))
    number = names_of(plain_model())[0].index("1.layer.0.self.key.weight")
    factors = {**there, "state": {**there["state"], number: {"row": torch.ones(7)}}}
    with pytest.raises(ValueError, match=r"its row of 1.layer.0.self.key.weight, of shape \(7,\), cannot"):
        fitting_state(module, factors, names_of(module))
    without = {**there, "state": {key: each for key, each in there["state"].items() if key != number}}
    with pytest.raises(ValueError, match=r"but not of 1.layer.0.self.key.weight: all of these are one"):
        fitting_state(module, without, names_of(module))
    own_factors = {**given, "state": {2: {"row": torch.ones(7)}}}
    assert original_state(module, own_factors, names_of(module)) == own_factors

"""An optimizer cut to some of its parameters, whose state dicts go by the whole optimizer's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opensmd.modelparallel.precision.layout import Layout


class Model:
    """Five layers, of which some are on this rank."""

    def __init__(self, *local: str) -> None:
        self.module = nn.Sequential(*[nn.Linear(size, 1, bias=False) for size in range(1, 6)])
        self.local = set(local)

    def is_local(self, name: str) -> bool:
        return name.partition(".")[0] in self.local

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        return parameter

    def has_replaced(self, parameter: nn.Parameter) -> bool:
        return False


def cut(model: Any, *, named: bool = False) -> tuple[Layout, torch.optim.Optimizer]:
    """Two groups of the model's parameters, 0 to 2 and 3 to 4, of which what is local is left."""
    parameters = list(model.module.named_parameters())
    groups = [parameters[:3], parameters[3:]]
    if not named:
        groups = [[parameter for _, parameter in group] for group in groups]  # type: ignore[misc]
    optimizer = torch.optim.Adam([{"params": group} for group in groups])
    layout = Layout(model)
    for group in optimizer.param_groups:
        layout.cut(group, optimizer.state)
    return layout, optimizer


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_what_is_left_has_the_whole_optimizers_numbers_in_state_dicts() -> None:
    layout, optimizer = cut(Model("1", "3"))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    step(optimizer)
    whole = layout.renumbered(optimizer.state_dict(), optimizer.param_groups)
    assert [group["params"] for group in whole["param_groups"]] == [[0, 1, 2], [3, 4]]
    assert {number: entry["exp_avg"].shape[1] for number, entry in whole["state"].items()} == {1: 2, 3: 4}


def test_a_whole_state_dict_is_cut_to_what_is_left() -> None:
    model = Model("0", "1", "2", "3", "4")
    whole = cut(model)[1]
    step(whole)
    model.local = {"1", "3"}
    layout, optimizer = cut(model)
    optimizer.load_state_dict(layout.localised(whole.state_dict(), optimizer.param_groups))
    assert layout.renumbered(optimizer.state_dict(), optimizer.param_groups)["state"].keys() == {1, 3}


def test_names_of_parameters_stay_with_them() -> None:
    layout, optimizer = cut(Model("1", "3"), named=True)
    assert [group["param_names"] for group in optimizer.param_groups] == [["1.weight"], ["3.weight"]]
    whole = layout.renumbered(optimizer.state_dict(), optimizer.param_groups)
    assert whole["param_groups"][0]["param_names"] == ["0.weight", "1.weight", "2.weight"]


def test_parameters_that_move_take_their_places_and_those_that_left_take_their_state() -> None:
    model = Model("1", "3")
    layout, optimizer = cut(model)
    step(optimizer)
    model.local = {"3", "4"}
    layout.follow_plan(optimizer.param_groups, optimizer.state)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 2]
    assert layout.renumbered(optimizer.state_dict(), optimizer.param_groups)["state"].keys() == {3}


def test_a_parameter_of_no_model_is_refused() -> None:
    layout = Layout(Model("0"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer, of shape \(7,\)"):
        layout.cut({"params": [nn.Parameter(torch.ones(7))]}, {})

"""What a group of parameters consists of."""

from __future__ import annotations

import torch
from torch import nn

from opensmd.optim.param_groups import group_settings, params_of


def test_settings_are_all_but_the_parameters_and_their_names() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).named_parameters(), lr=0.5)
    (group,), (saved,) = optimizer.param_groups, optimizer.state_dict()["param_groups"]
    assert {"params", "param_names"} <= set(group)
    assert group_settings(group) == group_settings(saved)
    assert set(group) - set(group_settings(group)) == {"params", "param_names"}
    assert group_settings(group)["lr"] == 0.5


def test_parameters_or_their_numbers_come_in_the_order_of_the_groups() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": second.parameters()}, {"params": first.parameters()}])
    expected = [*second.parameters(), *first.parameters()]
    assert list(map(id, params_of(optimizer.param_groups))) == list(map(id, expected))
    assert params_of(optimizer.state_dict()["param_groups"]) == [0, 1, 2, 3]

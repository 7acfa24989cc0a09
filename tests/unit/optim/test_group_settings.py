"""What a group of parameters is trained with."""

from __future__ import annotations

import torch
from torch import nn

from opensmd.optim.group_settings import group_settings


def test_settings_are_all_but_the_parameters_and_their_names() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).named_parameters(), lr=0.5)
    (group,), (saved,) = optimizer.param_groups, optimizer.state_dict()["param_groups"]
    assert {"params", "param_names"} <= set(group)
    assert group_settings(group) == group_settings(saved)
    assert set(group) - set(group_settings(group)) == {"params", "param_names"}
    assert group_settings(group)["lr"] == 0.5

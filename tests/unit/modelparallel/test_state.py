"""What scripts read from ``smp.state``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.torch.state_mod import state


def test_parameters_have_names_and_numbers_once_there_is_an_optimizer(initialised: None) -> None:
    with pytest.raises(SMPError, match=r"once smp\.DistributedOptimizer"):
        _ = state.param_index_to_name_tp_group
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    backwards = list(module.parameters())[::-1]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(backwards[:1], lr=0.1))
    optimizer.add_param_group({"params": backwards[1:]})
    with pytest.raises(SMPError, match=r"once smp\.DistributedModel"):
        _ = state.param_index_to_name_tp_group
    model = smp.DistributedModel(module)

    @smp.step
    def step(x: Tensor) -> None:
        model(x)

    for _ in range(2):  # before and after the first step
        assert state.param_index_to_name_tp_group == [{0: "1.weight", 1: "0.bias", 2: "0.weight"}]
        assert state.param_name_to_index_tp_group == [{"1.weight": 0, "0.bias": 1, "0.weight": 2}]
        step(torch.ones(1, 2))

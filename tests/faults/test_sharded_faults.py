"""A rank that dies while others wait for its part of the parameters: all of these name it."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.ranks import run_once

VICTIM = 1


def trains_until_a_rank_dies(block: int) -> None:
    settings = {"sdp_param_persistence_threshold": 0, "sdp_max_live_parameters": 1}
    smp.init({"sharded_data_parallel_degree": 3, "ddp": True, **settings})
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(model(x).sum())

    step(torch.ones(6, 64))
    optimizer.step()
    if smp.rank() == VICTIM:  # before the block is gathered, which the others have begun
        model.get_module()[block].register_forward_pre_hook(die, prepend=True)
    step(torch.ones(6, 64))


def test_a_rank_that_dies_in_an_all_gather_of_parameters_is_named_on_all_others() -> None:
    outcomes = run_once(3, trains_until_a_rank_dies, 2, silent=[VICTIM])
    for rank in (0, 2):
        assert outcomes[rank].kind == "error", outcomes[rank]
        text = str(outcomes[rank].value)
        assert f"rank {VICTIM}" in text and "all_gather" in outcomes[rank].text + text, text
        assert f"rank {2 - rank} died" not in text

"""The schedules of torch.distributed.pipelining, over gloo and over smddp, with the same layers as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.steps import LEARNING_RATE, build

__all__ = ["BACKENDS", "PEERS", "Peer", "peer_step"]

BACKENDS = ("gloo", "smddp")


class Peer(NamedTuple):
    """A schedule, and which pieces of the model a rank has, of one or two a rank."""

    title: str
    schedule: Callable[..., pipelining.schedules._PipelineSchedule]
    pieces: Callable[[int, int], tuple[int, ...]]  # of a rank, among so many


def _one(rank: int, ranks: int) -> tuple[int, ...]:
    return (rank,)


def _looped(rank: int, ranks: int) -> tuple[int, ...]:
    return rank, ranks + rank


def _in_a_v(rank: int, ranks: int) -> tuple[int, ...]:
    return rank, 2 * ranks - 1 - rank


PEERS = {
    "1f1b": Peer("1F1B", pipelining.Schedule1F1B, _one),
    "gpipe": Peer("GPipe", pipelining.ScheduleGPipe, _one),
    "interleaved": Peer("interleaved 1F1B", pipelining.ScheduleInterleaved1F1B, _looped),
    "izb": Peer("interleaved zero bubble", pipelining.ScheduleInterleavedZeroBubble, _looped),
    "zbv": Peer("ZBV", pipelining.ScheduleZBVZeroBubble, _in_a_v),
}


def peer_step(
    peer: Peer, case: Case, microbatches: int, rank: int, group: dist.ProcessGroup
) -> Callable[[], Tensor | None]:
    """A training step; it has the loss on the rank that computes it."""
    mine = peer.pieces(rank, group.size())
    pieces = case.stages(build(case), len(mine) * group.size())
    stages = [
        pipelining.PipelineStage(pieces[index], index, len(pieces), torch.device("cpu"), group=group)
        for index in mine
    ]
    chosen = stages[0] if len(stages) == 1 else stages
    schedule = peer.schedule(chosen, microbatches, loss_fn=case.loss)
    parameters = [parameter for index in mine for parameter in pieces[index].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    inputs, targets = case.batch(microbatches)
    given = [inputs] if 0 in mine else []

    def step() -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        last = {"target": targets, "losses": losses} if len(pieces) - 1 in mine else {}
        schedule.step(*given, **last)
        optimizer.step()
        return torch.stack(losses).detach().mean() if losses else None

    return step

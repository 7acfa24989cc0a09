"""The schedules of torch.distributed.pipelining, over gloo and over smddp, with the same layers as ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.steps import LEARNING_RATE, build

__all__ = ["BACKENDS", "PEERS", "Peer", "peer_step"]

RANKS = 2
BACKENDS = ("gloo", "smddp")


class Peer(NamedTuple):
    """A schedule, and which quarters or halves of the model each rank has."""

    title: str
    schedule: Callable[..., pipelining.schedules._PipelineSchedule]
    stages: tuple[tuple[int, ...], ...]


HALVES = ((0,), (1,))
LOOPED, IN_A_V = ((0, 2), (1, 3)), ((0, 3), (1, 2))
PEERS = {
    "1f1b": Peer("1F1B", pipelining.Schedule1F1B, HALVES),
    "gpipe": Peer("GPipe", pipelining.ScheduleGPipe, HALVES),
    "interleaved": Peer("interleaved 1F1B", pipelining.ScheduleInterleaved1F1B, LOOPED),
    "izb": Peer("interleaved zero bubble", pipelining.ScheduleInterleavedZeroBubble, LOOPED),
    "zbv": Peer("ZBV", pipelining.ScheduleZBVZeroBubble, IN_A_V),
}


def peer_step(
    peer: Peer, case: Case, microbatches: int, rank: int, group: dist.ProcessGroup
) -> Callable[[], Tensor | None]:
    """A training step; it has the loss on the rank that computes it."""
    pieces = _pieces(case, len(peer.stages[0]) * RANKS)
    mine = peer.stages[rank]
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


def _pieces(case: Case, count: int) -> Sequence[torch.nn.Module]:
    """The model's halves, or both of them halved."""
    whole = build(case)
    if count == RANKS:
        return [whole[: case.half], whole[case.half :]]
    first, last = case.half - case.half // 2, case.half + (len(whole) - case.half) // 2
    return [whole[:first], whole[first : case.half], whole[case.half : last], whole[last:]]

"""One rank: a schedule of ours, some of torch's and the bare layers take steps in turn."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import smdistributed.modelparallel.torch as smp
from benchmarks.harness.by_hand import ByHand
from benchmarks.harness.results import Results, row
from benchmarks.schedules.bounds import ALONE, BUSIEST, BY_HAND, LOOPED, SLEPT
from benchmarks.schedules.stages import WIDTH, Layer, Sleep
from opensmd.collectives.backend import register
from opensmd.modelparallel.planning.schedules.v import zero_bubble_v

LAYERS = 2  # of a rank
PEERS = {
    "1f1b": pipelining.Schedule1F1B,
    "izb": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
WARM_UP = 2  # steps of each
MEASURING = 7  # steps, in which some of ours find out which backwards they split
MEASURED = ("interleaved", "v", "simple")
Step = Callable[[], object]


class Times(NamedTuple):
    """Microseconds of a step.

    Attributes:
        taken: from the first rank's beginning to the last one's end.
        slept: what an average rank has slept.
        busiest: from a rank's first action to its last, of the rank of ours where that is longest. Steps that
            follow each other as closely as their ranks allow would take that long each.
    """

    taken: float
    slept: float
    busiest: float


def main() -> None:
    """Measure, and leave the results to rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--unit", type=float, default=Sleep.unit, help="seconds of one sleep")
    options = parser.parse_args()
    Sleep.unit = options.unit
    torch.set_num_threads(1)
    rank, ranks, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["BENCH_FOLDER"]
    register()
    dist.init_process_group("smddp", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    gloo: dist.ProcessGroup = dist.new_group(backend="gloo")
    results = Results("schedules", f"{ranks} ranks")
    steps = {
        ALONE: alone(options.microbatches),
        f"opensmd {options.schedule}": ours(options.schedule, options.microbatches),
    }
    if options.schedule == "v":
        steps[BY_HAND] = by_hand(options.microbatches)
    for peer in options.peers:
        steps[f"torch {peer}"] = peers(peer, options.microbatches, gloo)
    warm_up = MEASURING if options.schedule in MEASURED else WARM_UP
    for name, times in measured(steps, options.steps, warm_up).items():
        results.rows.append(row(str(ranks), options.microbatches, name, [each.taken for each in times]))
        slept = [each.slept for each in times]
        results.rows.append(row(str(ranks), options.microbatches, name + SLEPT, slept))
        if name.startswith("opensmd"):
            busiest = [each.busiest for each in times]
            results.rows.append(row(str(ranks), options.microbatches, name + BUSIEST, busiest))
    if rank == 0:
        results.save(Path(folder) / "results.json")
    dist.barrier()


def measured(steps: Mapping[str, Step], count: int, warm_up: int) -> dict[str, list[Times]]:
    """So many steps of each, in turn, after some that do not count: ``warm_up`` of ours."""
    times: dict[str, list[Times]] = {name: [] for name in steps}
    for number in range(count + warm_up):
        for name, step in steps.items():
            if name.startswith("opensmd") or number >= warm_up - WARM_UP:
                times[name].append(once(step))
    return {name: each[-count:] for name, each in times.items()}


def once(step: Step) -> Times:
    """One step of all ranks."""
    Sleep.slept = 0.0
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    taken = (time.perf_counter() - start) * 1e6
    total, busiest = torch.tensor(Sleep.slept), torch.tensor(own_span())
    dist.all_reduce(total)
    dist.all_reduce(busiest, dist.ReduceOp.MAX)
    return Times(taken, float(total) / dist.get_world_size() * 1e6, float(busiest))


def own_span() -> float:
    """Microseconds from this rank's first action to its last in our latest step."""
    engine = smp.state.engine
    work = [each for each in engine.record if each.kind != "wait"] if engine is not None else []
    return (work[-1].end_ns - work[0].start_ns) / 1e3 if work else 0.0


def alone(microbatches: int) -> Step:
    """The layers of a rank in plain PyTorch: without a schedule, messages and waiting."""
    layers = [Layer() for _ in range(LAYERS)]
    x = torch.ones(2, WIDTH)

    def step() -> None:
        for _ in range(microbatches):
            for layer in layers:
                layer(x).backward(x)

    return step


def by_hand(microbatches: int) -> Step:
    """The order of "v" over the same layers and messages, without a runtime."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    table, x = zero_bubble_v(ranks, microbatches), torch.ones(2, WIDTH)
    chunks = [Layer() for _ in table.stages[rank]]
    return ByHand(table, rank, chunks, [x] * microbatches, x, lambda out, _: out.square().mean())


def ours(schedule: str, microbatches: int) -> Step:
    """The library, with what its planner finds for the schedule."""
    ranks = dist.get_world_size()
    more: dict[str, object] = {"pipeline": schedule}
    if schedule == "zero_bubble":
        more["active_microbatches"] = 2 * ranks - 1
    if schedule == LOOPED:
        more = {"pipeline": "interleaved", "virtual_stages": 2}
    smp.init({"partitions": ranks, "microbatches": microbatches, **more})
    model = smp.DistributedModel(nn.Sequential(*[Layer() for _ in range(LAYERS * ranks)]))
    x = torch.ones(2 * microbatches, WIDTH)

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return lambda: step(x)


def peers(schedule: str, microbatches: int, group: dist.ProcessGroup) -> Step:
    """A schedule of torch.distributed.pipelining."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = {"1f1b": [rank], "zbv": [rank, 2 * ranks - 1 - rank]}.get(schedule, [rank, rank + ranks])
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(
            nn.Sequential(*[Layer() for _ in range(LAYERS // len(mine))]),
            index,
            len(mine) * ranks,
            device,
            group=group,
        )
        for index in mine
    ]
    kind = PEERS[schedule]
    chosen = stages[0] if len(mine) == 1 else stages
    made = kind(chosen, microbatches, loss_fn=lambda out, target: out.square().mean())  # type: ignore[arg-type]
    x = torch.ones(2 * microbatches, WIDTH)
    inputs = [x] if 0 in mine else []
    is_last = len(mine) * ranks - 1 in mine

    def step() -> None:
        last = {"target": x, "losses": []} if is_last else {}
        made.step(*inputs, **last)

    return step


if __name__ == "__main__":
    main()

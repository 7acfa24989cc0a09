"""One rank of the pipeline benchmark: one process, torch's pipeline and ours take steps in turn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

import smdistributed.modelparallel.torch as smp
from benchmarks.harness.options import plan, rank_parser
from benchmarks.harness.rank import Rank, join, leave
from benchmarks.harness.results import Results, row
from benchmarks.harness.sampling import Candidate, sample, timed
from benchmarks.pipeline.cases import ALONE, CASES, OURS, SINGLE, Case
from benchmarks.pipeline.peers import BACKENDS, PEERS, peer_step
from benchmarks.pipeline.steps import LEARNING_RATE, build, library_step, plain_step
from opensmd.collectives.backend import register

Step = Callable[[], Tensor | None]  # the loss on the ranks that know it


def main() -> None:
    """Measure one case with one number of microbatches and leave the results to rank 0."""
    parser = rank_parser()
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--pipeline", default="interleaved")
    options = parser.parse_args()
    me = over_smddp(join([], patience=options.patience))
    case, microbatches = CASES[options.case], options.microbatches
    steps = {
        SINGLE: single(case, microbatches, me),
        **torch_pipelines(options.peers, case, microbatches, me),
        OURS: ours(case, microbatches, options.pipeline, ranks=me.size),
    }
    compare(steps)
    if not case.automatic:
        steps[ALONE] = alone(case, microbatches, me)
    candidates = [Candidate(name, timed(step)) for name, step in steps.items()]
    results = Results("pipeline", me.layout)
    for name, samples in sample(candidates, me.meeting, me.calm, plan(options)).items():
        results.rows.append(row(case.title, microbatches, name, samples))
    leave(me, results)


def over_smddp(me: Rank) -> Rank:
    """``me`` with smddp as the default backend, which the library takes, and groups for torch's pipeline."""
    dist.destroy_process_group()
    register()
    store = f"file://{me.folder}/smddp"
    dist.init_process_group("smddp", init_method=store, rank=me.rank, world_size=me.size)
    groups: dict[str, dist.ProcessGroup] = {name: dist.new_group(backend=name) for name in BACKENDS}
    return replace(me, groups=groups)


def single(case: Case, microbatches: int, me: Rank) -> Step:
    """Rank 0 trains the whole model on one core; the others wait."""
    return (lambda: None) if me.rank else plain_step(case, microbatches)


def torch_pipelines(names: Sequence[str], case: Case, microbatches: int, me: Rank) -> dict[str, Step]:
    """torch's own schedules that were asked for, as SCHEDULE/BACKEND, by their titles."""
    found = {}
    for name in names:
        schedule, backend = name.split("/")
        peer = PEERS[schedule]
        title = f"torch {peer.title}" + ("" if backend == "gloo" else f" over {backend}")
        found[title] = peer_step(peer, case, microbatches, me.rank, me.groups[backend])
    return found


def alone(case: Case, microbatches: int, me: Rank) -> Step:
    """Every rank trains its stage on what it would receive, without the others; the busiest is the limit."""
    stages = case.stages(build(case), me.size)
    inputs, targets = (one.chunk(microbatches) for one in case.batch(microbatches))
    mine, begins, ends = stages[me.rank], me.rank == 0, me.rank == me.size - 1
    with torch.no_grad():
        for stage in stages[: me.rank]:
            inputs = [stage(x) for x in inputs]
        gradients = [torch.full_like(out, 1 / out.numel()) for out in map(mine, inputs)]
    optimizer = torch.optim.SGD(mine.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        for number in range(microbatches):
            out = mine(inputs[number] if begins else inputs[number].detach().requires_grad_())
            if ends:
                torch.autograd.backward(case.loss(out, targets[number]) / microbatches)
            else:
                torch.autograd.backward(out, gradients[number])
        optimizer.step()

    return step


def ours(case: Case, microbatches: int, pipeline: str = "interleaved", *, ranks: int = 2) -> Step:
    """The library, with torch's stages or with its own, which a V needs."""
    automatic = case.automatic or pipeline == "v"
    placing: dict[str, object] = {"auto_partition": False, "default_partition": 0}
    if automatic:
        placing = {"optimize": "speed", "memory_weight": 0.0}
    smp.init({"partitions": ranks, "microbatches": microbatches, "pipeline": pipeline, **placing})
    module = build(case)
    if not automatic:
        cuts = case.cuts(ranks)
        for index, child in enumerate(module):
            smp.set_partition(child, bisect_right(cuts, index))
    return library_step(case, module, microbatches)


def compare(steps: dict[str, Step]) -> None:
    """The first three steps of all candidates must have the same losses (also warms up)."""
    for number in range(3):
        losses = {name: step() for name, step in steps.items()}
        known: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
        mine = {name: float(loss) for name, loss in losses.items() if loss is not None}
        dist.all_gather_object(known, mine)
        everything = {name: loss for one in known for name, loss in one.items()}
        reference = everything[SINGLE]
        for name, loss in everything.items():
            if abs(loss - reference) > 1e-4 * abs(reference):
                raise RuntimeError(f"step {number}: {name} has loss {loss}, one process has {reference}")


if __name__ == "__main__":
    main()

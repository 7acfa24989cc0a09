"""One rank of the DDP benchmark: copies of a model, one a candidate, take training steps in turn.

What the step needs above a backend that does nothing is the price of communication that the backward pass did
not hide. The models are plain stacks of square linear layers, the batch is small: this is where communication
weighs most.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.contestants import title
from benchmarks.harness.rank import Rank
from benchmarks.harness.sampling import Candidate, timed
from benchmarks.harness.widths import measure_widths

SWITCH = "DDP_DISABLE_COMM_MEM"  # torch's own: "0" lets the backend allocate the gradient buckets
LAYERS = 4
BATCH = 16


def main() -> None:
    """Measure every model and leave the results to rank 0."""
    measure_widths("ddp step", contestants, case=case)


def case(width: int) -> tuple[str, int]:
    """What the model of a width is called, and the bytes of its parameters."""
    parameters = LAYERS * width * (width + 1)
    return f"{parameters / 1e6:.3g} million parameters", 4 * parameters


def contestants(me: Rank, width: int) -> list[Candidate]:
    """A copy of the model for every backend, and one more for smddp with its buckets in shared memory."""
    found = []
    for backend, group in me.groups.items():
        step, model = training(group, width, fake=backend == "fake")
        found.append(Candidate(title(backend), timed(step), _check(step, model, backend)))
        if backend == "smddp":
            step, model = training(group, width, zero_copy=True)
            found.append(Candidate("smddp zero-copy", timed(step), _check(step, model, backend)))
    return found


def training(
    group: dist.ProcessGroup, width: int, *, zero_copy: bool = False, fake: bool = False
) -> tuple[Callable[[], None], DistributedDataParallel]:
    """A function that does one step, and the model it trains. Buckets settle in the first two steps."""
    os.environ[SWITCH] = "0" if zero_copy else "1"
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group, gradient_as_bucket_view=True)
    if fake:
        model.register_comm_hook(None, _only_divide)  # torch's do-nothing work has no result, which DDP wants
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(BATCH, width, generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step, model


def _only_divide(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done


def _check(step: Callable[[], None], model: DistributedDataParallel, backend: str) -> Callable[[], None]:
    """After a step all ranks must hold the same parameters, to the bit."""

    def check() -> None:
        step()
        if backend == "fake":
            return
        for parameter in model.parameters():
            first = parameter.detach().clone()
            dist.broadcast(first, 0)
            if not torch.equal(first, parameter):
                raise RuntimeError(f"{backend}: the ranks hold different parameters after a step")

    return check


if __name__ == "__main__":
    main()

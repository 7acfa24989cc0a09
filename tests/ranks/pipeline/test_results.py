"""What a step returns is real on every rank, whatever its size, dtype and place."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.init import shutdown
from tests.support.ranks import RankPool

MICROBATCHES = 4
CALLS = itertools.count()
FLOATS = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]


class Turned(nn.Module):
    """Results of one shape whose strides are not those of the call before."""

    def forward(self, x: Tensor) -> Tensor:
        turned = (x * 2).t()
        return turned.contiguous() if next(CALLS) % 2 else turned


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def returned(model: Any, x: Tensor) -> dict[str, Any]:
    """Of one microbatch: small and large tensors of many dtypes, from both stages and from every rank."""
    first = model[0](x)
    last = model[1](first)
    return {
        "loss": last.square().mean(),
        "stages": [first.t(), last, (last[:0], x)],
        "dtypes": [last.to(dtype) for dtype in FLOATS],
        "kinds": (last > 0, last.argmax(1)),
        "large": last.repeat(40, 30).t(),
        "early and large": first.repeat(300, 1),
    }


class Whole(nn.Module):
    """A model whose forward is all of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = build()

    def forward(self, x: Tensor) -> dict[str, Any]:
        return returned(self.parts, x)


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [one for key in value for one in flat(value[key])]
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in flat(part)]
    return [value]


def start(module: nn.Module, **settings: Any) -> Any:
    shutdown()
    given = {"partitions": 2, "microbatches": MICROBATCHES, "auto_partition": False, "default_partition": 0}
    smp.init({**given, **settings})
    return smp.DistributedModel(module)


def everything_is_returned(fixed_order: bool) -> None:
    module = Whole()
    model = start(module, deterministic_server=fixed_order)
    smp.set_partition(module.parts[1], 1)

    @smp.step
    def train(x: Tensor) -> Any:
        found = model(x)
        model.backward(found["loss"])
        return found

    x = torch.randn(MICROBATCHES * 2, 6, generator=torch.Generator().manual_seed(1))
    plain = [returned(build(), part) for part in x.chunk(MICROBATCHES)]
    for _ in range(2):
        outputs = [one.outputs for one in flat(train(x))]
        for microbatch, wanted in enumerate(plain):
            for place, (found, expected) in enumerate(zip(outputs, flat(wanted), strict=True)):
                mine = found[microbatch]
                assert mine.dtype == expected.dtype and mine.stride() == expected.stride(), place
                assert not mine.requires_grad
                assert torch.equal(mine.to(torch.complex128), expected.to(torch.complex128)), place


def results_in_any_order() -> None:
    everything_is_returned(fixed_order=False)


def results_in_fixed_order() -> None:
    everything_is_returned(fixed_order=True)


def strides_that_change() -> None:
    """Numbers arrive in their places although their home lays them out in another way than it had told."""
    module = nn.Sequential(Turned(), nn.Linear(3, 2))
    model = start(module)
    smp.set_partition(module[1], 1)

    @smp.step
    def evaluate(x: Tensor) -> Any:
        with torch.no_grad():
            turned = module[0](x)
            return turned, module[1](turned), model is not None

    x = torch.arange(MICROBATCHES * 3 * 4.0).view(MICROBATCHES * 3, 4)
    for _ in range(3):
        turned, last, _ = evaluate(x)
        for part, found, after in zip(x.chunk(MICROBATCHES), turned.outputs, last.outputs, strict=True):
            assert torch.equal(found, part.t() * 2)
            if smp.pp_rank() == 1:
                assert torch.allclose(after, module[1](part.t() * 2))
    dist.barrier()


@pytest.mark.parametrize("case", [results_in_any_order, results_in_fixed_order, strides_that_change])
def test_results(pool: Callable[[int], RankPool], case: Callable[[], None]) -> None:
    pool(2).run(case)

"""Backwards that wait for their gradients are deferred; step functions that go on must not notice."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from tests.support.partitioned import restart
from tests.support.ranks import RankPool

WIDTH, STEPS = 6, 3
Result = dict[str, Tensor | float]
Backward = Callable[[Tensor], None]
AfterBackward = Callable[[nn.Module, Tensor, Tensor, Tensor, Backward], Result]


def stages(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()) for _ in range(count)]
    )


def nothing(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor, backward: Backward) -> Result:
    return {}


def reads_the_loss(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor, backward: Backward) -> Result:
    return {"loss": loss.item()}


def reads_gradients(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor, backward: Backward) -> Result:
    """Only whether they are there: microbatches add to them in turns."""
    return {"there": float(sum(bool((p.grad.abs().sum() > 0).item()) for p in model.parameters()))}


def changes_the_input(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor, backward: Backward) -> Result:
    x.mul_(2.0)
    return {}


def goes_on(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor, backward: Backward) -> Result:
    again = F.l1_loss(model(x * 0.5), y)
    backward(again)
    return {"again": again, "sum": (loss + again).detach()}


def goes_on_three_times(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor, backward: Backward) -> Result:
    result = {f"{n}": model(x + n).square().mean() for n in range(3)}
    for one in result.values():
        backward(one)
    return {**result, "number": loss.item()}


def scales_gradients_later(
    model: nn.Module, x: Tensor, y: Tensor, loss: Tensor, backward: Backward
) -> Result:
    """A hook that comes after a backward is none of its."""
    out = model(x)
    backward(out.mean())
    out.register_hook(lambda gradient: gradient * 1000)
    return {"out": out.detach()}


def forwards_only(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor, backward: Backward) -> Result:
    with torch.no_grad():
        return {"out": model(x).sum()}


AFTERWARDS: list[AfterBackward] = [
    nothing,
    reads_the_loss,
    reads_gradients,
    changes_the_input,
    goes_on,
    goes_on_three_times,
    scales_gradients_later,
    forwards_only,
]


def one_microbatch(
    model: nn.Module, x: Tensor, y: Tensor, after: AfterBackward, backward: Backward
) -> Result:
    x = x.clone()  # of which microbatches are views
    loss = F.mse_loss(model(x), y)
    backward(loss)
    return {"first": loss, **after(model, x, y, loss, backward)}


def batch(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 2 * microbatches, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def plain(
    count: int, microbatches: int, after: AfterBackward
) -> tuple[list[dict[str, list[float]]], list[Tensor]]:
    """Results of each microbatch and gradients of each step in one process."""
    model = stages(count)
    results, gradients = [], []
    for step in range(STEPS):
        model.zero_grad()
        found: dict[str, list[float]] = {}
        for x, y in zip(*(entry.chunk(microbatches) for entry in batch(step, microbatches)), strict=True):
            one = one_microbatch(model, x, y, after, lambda loss: (loss / microbatches).backward())
            for name, value in one.items():
                found.setdefault(name, []).append(float(value.sum() if isinstance(value, Tensor) else value))
        results.append(found)
        gradients += [p.grad.clone() for p in model.parameters()]
    return results, gradients


def split(count: int, microbatches: int, pipeline: str, looped: bool, after: AfterBackward) -> set[str]:
    """The same over the ranks of the pool, compared with :func:`plain`; the threads of the last step."""
    wanted, gradients = plain(count, microbatches, after)
    ranks = torch.distributed.get_world_size()
    restart(
        partitions=ranks,
        microbatches=microbatches,
        pipeline=pipeline,
        auto_partition=False,
        default_partition=0,
    )
    module = stages(count)
    for number, one in enumerate(module):
        smp.set_partition(one, number % ranks if looped else number * ranks // count)
    model = smp.DistributedModel(module)

    @smp.step
    def train(x: Tensor, y: Tensor) -> Result:
        threads.append(threading.current_thread().name)
        return one_microbatch(model, x, y, after, model.backward)

    threads: list[str] = []
    found_gradients: list[Tensor | None] = []
    for step in range(STEPS):
        module.zero_grad()
        found = train(*batch(step, microbatches))
        for name, values in wanted[step].items():
            each = found[name]
            mine = [v.sum().item() for v in each.outputs] if hasattr(each, "outputs") else each
            torch.testing.assert_close(
                mine, values, msg=lambda text, name=name: f"{after.__name__} {name}: {text}"
            )
        found_gradients += [
            p.grad.clone() if model.is_local(name) else None for name, p in module.named_parameters()
        ]
    for mine_, theirs in zip(found_gradients, gradients, strict=True):
        if mine_ is not None:
            torch.testing.assert_close(mine_, theirs, msg=lambda text: f"{after.__name__}: {text}")
    return set(threads[-microbatches:])


def all_ways(count: int, microbatches: int, pipeline: str, looped: bool) -> None:
    for after in AFTERWARDS:
        split(count, microbatches, pipeline, looped, after)


@pytest.mark.parametrize("looped", [False, True], ids=["chain", "looped"])
@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_step_functions_may_go_on_after_a_backward(
    pool: Callable[[int], RankPool], ranks: int, pipeline: str, looped: bool
) -> None:
    pool(ranks).run(all_ways, 4, 4, pipeline, looped)


def test_a_chain_whose_function_ends_with_its_backward_takes_no_further_thread(
    pool: Callable[[int], RankPool],
) -> None:
    assert pool(2).run(split, 4, 8, "interleaved", False, nothing) == [{threading.main_thread().name}] * 2

"""Steps on one partition: microbatches and replicas train like one process on the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPError
from tests.support.ranks import RankPool

ROWS = 8
STEPS = 4
SETTINGS: list[dict[str, Any]] = [
    {},
    {"backward_passes_per_step": 2},
    {"overlapping_allreduce": False},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    {"average_grads_across_microbatches": False},
]


def _net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def _batches(replicas: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = ROWS * replicas
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator))
        for _ in range(STEPS)
    ]


def _plain(replicas: int, settings: dict[str, Any], microbatches: int) -> tuple[list[float], list[Tensor]]:
    """One process, whole batches; the sum over microbatches is their mean times their number."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    passes = settings.get("backward_passes_per_step", 1)
    scale = 1.0 if settings.get("average_grads_across_microbatches", True) else float(microbatches)
    losses = []
    for number, (x, y) in enumerate(_batches(replicas)):
        loss = nn.functional.cross_entropy(net(x), y)
        (loss * scale).backward()
        losses.append(loss.item())
        if (number + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [parameter.detach() for parameter in net.parameters()]


@contextlib.contextmanager
def _started(**config: Any) -> Iterator[None]:
    smp.shutdown()
    smp.init(config)
    try:
        yield
    finally:
        smp.shutdown()


def _train(settings: dict[str, Any], microbatches: int) -> tuple[list[float], list[Tensor]]:
    with _started(microbatches=microbatches, ddp=True):
        model = smp.DistributedModel(_net(), **settings)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @smp.step
        def train_step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
            loss = nn.functional.cross_entropy(model(x), y)
            model.backward(loss)
            return loss, loss.item()

        passes = settings.get("backward_passes_per_step", 1)
        losses = []
        for number, (x, y) in enumerate(_batches(smp.dp_size())):
            own = slice(smp.dp_rank() * ROWS, (smp.dp_rank() + 1) * ROWS)
            loss, numbers = train_step(model, x[own], y[own])
            assert numbers == [output.item() for output in loss.outputs]
            mean = loss.reduce_mean()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=smp.get_dp_process_group())
            losses.append(mean.item())
            if (number + 1) % passes == 0:
                optimizer.step()
                optimizer.zero_grad()
        return losses, [parameter.detach().clone() for parameter in model.local_parameters()]


def _train_like_plain() -> None:
    for settings in SETTINGS:
        for microbatches in (1, 2, 4):
            losses, parameters = _train(settings, microbatches)
            wanted_losses, wanted = _plain(dist.get_world_size(), settings, microbatches)
            torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(parameters, wanted, rtol=1e-5, atol=1e-6)


def _misuse() -> list[str]:
    told = []
    with _started(microbatches=2, ddp=True):
        told.append(_told(SMPError, lambda: smp.step(abs)(torch.ones(2))))
        model = smp.DistributedModel(_net())
        told.append(_told(SMPError, lambda: model(torch.ones(1, 6))))
        told.append(_told(SMPError, lambda: smp.DistributedModel(_net())))
        told.append(_told(ValueError, lambda: smp.step(lambda x: model(x))(torch.ones(3, 6))))
        told.append(_told(TypeError, lambda: smp.step(["x"])))  # type: ignore[call-overload]
        told.append(_told(TypeError, lambda: smp.step(lambda x: model.backward(2.0))(torch.ones(2, 6))))
        with torch.no_grad():
            backward = smp.step(lambda x: model.backward(model(x).sum()))
            told.append(_told(RuntimeError, lambda: backward(torch.ones(2, 6))))
        with torch.no_grad():
            outputs = smp.step()(lambda x: {"logits": model(x)})(torch.ones(4, 6))
        assert outputs["logits"].concat().shape == (4, 3)
        assert model.partitioned
    return told


def _told(kind: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def test_microbatches_and_replicas_train_like_one_process(pool: Callable[[int], RankPool]) -> None:
    pool(2).run(_train_like_plain)


def test_misuse_says_what_to_do(pool: Callable[[int], RankPool]) -> None:
    for told in pool(2).run(_misuse):
        unwrapped, outside, twice, uneven, options, number, untrained = told
        assert "before smp.DistributedModel" in unwrapped
        assert "outside a step" in outside
        assert "only one model" in twice
        assert "2 microbatches do not divide" in uneven
        assert "got list; options are given by name" in options
        assert "expected a tensor or a sequence of tensors, got float" in number
        assert "ran under torch.no_grad()" in untrained

"""Quantized weights and quantized optimizer state, which are tensors made of others, in a split model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from tests.support.equality import Pools
from tests.support.partitioned import restart
from tests.support.quantized import Adapted, Quantized, QuantizedMomentum

WIDTH = 160  # of weights that are copied beside training


def net(*, adapted: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Adapted(WIDTH) if adapted else nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def optimizer_of(model: nn.Module, *, adapted: bool) -> torch.optim.Optimizer:
    """Only one of the two is quantized: quantizing makes more of roundings."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.SGD(trained, 0.1) if adapted else QuantizedMomentum(trained)


def rows(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def trained_whole(*, adapted: bool, steps: int) -> tuple[list[float], Any, Any]:
    """In this process alone: losses, and what model and optimizer have then."""
    model = net(adapted=adapted)
    optimizer = optimizer_of(model, adapted=adapted)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        halves = [model(half).square().mean() / 2 for half in rows(step).chunk(2)]
        for half in halves:
            half.backward()
        losses.append(sum(half.item() for half in halves))
        optimizer.step()
    return losses, model.state_dict(), optimizer.state_dict()


class Split:
    """A model in parts with its optimizer."""

    def __init__(self, *, adapted: bool) -> None:
        self.model = smp.DistributedModel(net(adapted=adapted))
        self.optimizer = smp.DistributedOptimizer(optimizer_of(self.model, adapted=adapted))

        @smp.step
        def run(given: Tensor) -> Tensor:
            loss = self.model(given).square().mean()
            self.model.backward(loss)
            return loss

        self._run = run

    def train(self, steps: range, share: slice = slice(None)) -> list[float]:
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            losses.append(self._run(rows(step)[share]).reduce_mean().item())
            self.optimizer.step()
        return losses


def assert_same(found: Any, expected: Any) -> None:
    """Nested state dicts have the same numbers, quantized where the other is."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, Quantized):
        torch.testing.assert_close(found.values(), expected.values(), rtol=0.02, atol=1e-6)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])


def trained_like_one_process(*, adapted: bool) -> tuple[Split, Any, Any]:
    """A model in two parts after three steps, with the losses of one process, and what that has then."""
    restart(partitions=2, microbatches=2)
    split = Split(adapted=adapted)
    losses = split.train(range(3))
    whole_losses, model, optimizer = trained_whole(adapted=adapted, steps=3)
    torch.testing.assert_close(losses, whole_losses)
    return split, model, optimizer


def states_of_an_optimizer(folder: str) -> None:
    split, _, whole = trained_like_one_process(adapted=False)
    assert_same(split.optimizer.state_dict(), whole)
    saved = {}
    for partial in (True, False):
        for blocking in (True, False):
            saved[tag := f"{partial}-{blocking}"] = partial
            smp.save_checkpoint(folder, tag, partial, split.model, split.optimizer, blocking=blocking)
    expected = split.train(range(3, 5))
    restart(partitions=2, microbatches=2)  # which waits for what is saved
    for tag, partial in saved.items():
        restart(partitions=2, microbatches=2)
        again = Split(adapted=False)
        smp.resume_from_checkpoint(folder, tag, partial)
        assert again.train(range(3, 5)) == pytest.approx(expected, rel=1e-5), tag
    restart(partitions=2, microbatches=2)


def test_quantized_optimizer_state_is_gathered_saved_and_resumed(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(states_of_an_optimizer, str(tmp_path))


def quantized_weights(folder: str) -> None:
    split, whole, _ = trained_like_one_process(adapted=True)
    remote = [
        each
        for name, each in split.model.get_module().named_parameters()
        if name.endswith("base") and not split.model.is_local(name)
    ]
    assert len(remote) == 2
    for each in remote:
        assert isinstance(each, Quantized) and isinstance(each, nn.Parameter)
        assert each.shape == (WIDTH, WIDTH) and each.codes.is_meta
        for read in (each, each.detach(), each.data):
            with pytest.raises(SMPUnsupportedError, match="whose data is on another pipeline rank"):
                read.sum()
    assert_same(dict(split.model.state_dict()), dict(whole))
    smp.save_checkpoint(folder, "quantized", True, split.model, split.optimizer, blocking=False)
    expected = split.train(range(3, 5))
    split.model.load_state_dict(whole)
    assert_same(dict(split.model.state_dict()), dict(whole))
    split.model.cpu()
    torch.testing.assert_close(
        split.model.get_module()(rows(9)), as_whole(whole)(rows(9)), rtol=1e-4, atol=1e-5
    )
    restart(partitions=2, microbatches=2)
    again = Split(adapted=True)
    smp.resume_from_checkpoint(folder, "quantized")
    assert again.train(range(3, 5)) == pytest.approx(expected, rel=1e-5)
    restart(partitions=2, microbatches=2)


def as_whole(state: Any) -> nn.Module:
    model = net(adapted=True)
    model.load_state_dict(state)
    return model


def test_quantized_weights_live_on_one_rank_and_come_whole_into_state_dicts(
    pool: Pools, tmp_path: Path
) -> None:
    pool(2).run(quantized_weights, str(tmp_path))


def replicas_of_quantized_weights() -> None:
    restart(partitions=2, microbatches=2, ddp=True)
    split = Split(adapted=True)
    with torch.no_grad():
        for parameter in split.model.parameters():
            if smp.dp_rank() == 1 and isinstance(parameter, Quantized):
                parameter.codes.zero_()  # the first replica's are everybody's
    share = slice(smp.dp_rank() * 4, smp.dp_rank() * 4 + 4)
    losses = torch.tensor(split.train(range(3), share)) / 2
    torch.distributed.all_reduce(losses, group=smp.get_dp_process_group())
    whole_losses, whole, _ = trained_whole(adapted=True, steps=3)
    torch.testing.assert_close(losses.tolist(), whole_losses, rtol=1e-5, atol=1e-6)
    assert_same(dict(split.model.state_dict()), dict(whole))


def test_replicas_of_quantized_weights_train_as_one_process(pool: Pools) -> None:
    pool(4).run(replicas_of_quantized_weights)

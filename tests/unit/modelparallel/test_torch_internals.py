"""The places in torch that the engine asks are still there, and are left as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.nn.utils import parametrize

from opensmd.modelparallel import _torch_internals as internals
from opensmd.modelparallel.dry_run import _torch_internals as dry_run

pytestmark = pytest.mark.newest


def test_reentrant_checkpoints_and_backward_hooks_are_recognised() -> None:
    assert internals.is_reentrant_checkpoint(torch_checkpoint.CheckpointFunction)
    module = nn.Linear(2, 2)
    assert not internals.has_backward_hooks(module)
    module.register_full_backward_hook(lambda *_: None)
    assert internals.has_backward_hooks(module)


def test_backward_without_torchs_checks_accumulates_what_backward_does() -> None:
    def gradient(backward: Callable[..., None], **options: Any) -> Tensor:
        weight = torch.arange(3.0, requires_grad=True)
        roots = (weight.square(), weight.sum())
        for _ in range(2):
            backward(roots, (torch.ones(3), torch.tensor(2.0)), **options)
        assert weight.grad is not None
        return weight.grad

    expected = gradient(torch.autograd.backward, retain_graph=True)
    assert torch.equal(gradient(internals.run_backward, retain_graph=True), expected)


def test_backward_without_torchs_checks_frees_the_graph_unless_told() -> None:
    root = torch.ones(1, requires_grad=True).square()
    internals.run_backward([root], [torch.ones(1)], retain_graph=False)
    with pytest.raises(RuntimeError, match="second time"):
        internals.run_backward([root], [torch.ones(1)], retain_graph=False)


def test_an_unversioned_change_is_none_to_a_backward_that_keeps_the_tensor() -> None:
    x, kept = torch.ones(2, requires_grad=True), torch.ones(2)
    loss = (x * kept).sum()
    with internals.unversioned(kept):
        kept.fill_(3.0)
    loss.backward()
    assert kept.tolist() == [3.0, 3.0]


def test_transforms_are_seen_from_inside() -> None:
    seen: list[tuple[bool, bool]] = []

    def inside(x: Tensor) -> Tensor:
        seen.append((internals.in_transform(), internals.is_of_transform(x)))
        return x.sum()

    inside(torch.ones(2))
    torch.func.grad(inside)(torch.ones(2))
    torch.vmap(inside)(torch.ones(2, 2))
    assert seen == [(False, False), (True, True), (True, True)]


def test_the_cache_of_parametrizations_is_set_aside_and_put_back() -> None:
    layer = parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Tanh())
    with parametrize.cached():
        outer = layer.weight
        kept = internals.parametrization_cache()
        with dry_run.own_parametrization_cache():
            assert layer.weight is not outer
        assert layer.weight is outer
        internals.put_parametrization_cache((1, {}))
        assert layer.weight is not outer
        internals.put_parametrization_cache(kept)
        assert layer.weight is outer
    assert internals.parametrization_cache() is None
    internals.put_parametrization_cache(kept)
    internals.put_parametrization_cache(None)
    assert layer.weight is not outer


def test_modules_are_known_as_compiled_whichever_way() -> None:
    plain, itself = nn.Linear(2, 2), nn.Linear(2, 2)
    itself.compile()
    returned = torch.compile(plain)
    assert [internals.is_compiled(module) for module in (plain, itself, returned)] == [False, True, True]
    assert [internals.is_returned_by_compile(module) for module in (itself, returned)] == [False, True]

"""The places in torch that the engine reaches into are still there, and are left as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opensmd.modelparallel import _torch_internals as internals


class Double(torch.autograd.Function):
    """Twice its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def test_functions_of_torch_go_through_the_replacements_and_come_back() -> None:
    seen: list[str] = []

    def note(name: str) -> Any:
        def call(original: Any, *rest: Any) -> Any:
            seen.append(name)
            args, kwargs = rest[-2:]
            return original(*args, **kwargs)

        return call

    before = (
        torch.autograd.Function.__dict__["apply"],
        torch_checkpoint._checkpoint_without_reentrant_generator,
        torch.autograd.backward,
        torch.jit.ScriptFunction.__call__,
    )
    names = ("apply", "script", "checkpoint")
    with (
        internals.replaced_functions(**{name: note(name) for name in names}),
        internals.replaced_backward(note("backward")),
    ):
        x = torch.ones(2, requires_grad=True)
        y = Double.apply(x)
        z = torch_checkpoint.checkpoint(torch.sin, y, use_reentrant=False)
        torch.autograd.backward(z.sum())
    assert {"apply", "checkpoint", "backward"} <= set(seen)
    assert x.grad is not None
    after = (
        torch.autograd.Function.__dict__["apply"],
        torch_checkpoint._checkpoint_without_reentrant_generator,
        torch.autograd.backward,
        torch.jit.ScriptFunction.__call__,
    )
    assert [one is other for one, other in zip(before, after, strict=True)][:3] == [True] * 3


def test_a_modules_call_is_replaced_for_a_while() -> None:
    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    expected = module(x)
    with internals.replaced_calls({module: lambda x: x + 1}, {}):
        assert torch.equal(module(x), x + 1)
    with internals.replaced_calls({}, {module: lambda x: x - 1}):
        assert torch.equal(module(x), x - 1)
    assert torch.equal(module(x), expected)
    assert "forward" not in module.__dict__


def test_optimizers_ask_for_a_while_before_they_step_or_clear_gradients() -> None:
    seen: list[tuple[Any, str]] = []
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    with internals.optimizers_asking(lambda each, name: seen.append((each, name))):
        optimizer.step()
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert seen == [(optimizer, "optimizer.step"), (optimizer, "optimizer.zero_grad")]


def test_reentrant_checkpoints_and_backward_hooks_are_recognised() -> None:
    assert internals.is_reentrant_checkpoint(torch_checkpoint.CheckpointFunction)
    module = nn.Linear(2, 2)
    assert not internals.has_backward_hooks(module)
    module.register_full_backward_hook(lambda *_: None)
    assert internals.has_backward_hooks(module)


class Counting(TorchFunctionMode):
    """Counts what it sees."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_is_set_aside_and_put_back() -> None:
    with Counting() as mode:
        torch.ones(1) + 1
        seen = mode.count
        with internals.WithoutMode(mode):
            torch.ones(1) + 1
        assert mode.count == seen
        torch.ones(1) + 1
        assert mode.count > seen
        assert internals.function_modes()[-1] is mode


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

"""What of torch is replaced for a while is still there, and comes back as it was."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from opensmd.modelparallel.redirection import _torch_internals as internals

pytestmark = pytest.mark.newest


class Double(torch.autograd.Function):
    """Twice its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def replaced_places() -> list[Any]:
    """What stands where the engine puts its own functions for the time of a step."""
    generators = [name for name in vars(torch_checkpoint) if "_without_reentrant_generator" in name]
    return [
        torch.autograd.Function.__dict__["apply"],
        *(getattr(torch_checkpoint, name) for name in generators),
        torch.autograd.backward,
    ]


def test_functions_of_torch_go_through_the_replacements_and_come_back() -> None:
    seen: list[str] = []

    def note(name: str) -> Any:
        def call(original: Any, *rest: Any) -> Any:
            seen.append(name)
            args, kwargs = rest[-2:]
            return original(*args, **kwargs)

        return call

    before = replaced_places()
    names = ("apply", "script", "checkpoint")
    with (
        internals.replaced_functions(**{name: note(name) for name in names}),
        internals.replaced_backward(note("backward")),
    ):
        x = torch.ones(2, requires_grad=True)
        y = Double.apply(x)
        z = torch_checkpoint.checkpoint(torch.sin, y, use_reentrant=False)
        torch.autograd.backward(z.sum())
    assert seen == ["apply", "checkpoint", "backward"]
    assert x.grad is not None
    assert all(now is then for now, then in zip(replaced_places(), before, strict=True))


def test_functional_call_enters_what_is_given_around_it_and_no_longer_than_wanted() -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def note(original: Any, args: Any, kwargs: Any) -> Iterator[None]:
        with original(*args, **kwargs):
            seen.append("in")
            yield
        seen.append("out")

    layer, other = torch.nn.Linear(2, 2, bias=False), {"weight": torch.eye(2)}
    with internals.other_parameters_through(note):
        assert torch.func.functional_call(layer, other, (torch.ones(1, 2),)).tolist() == [[1, 1]]
    torch.func.functional_call(layer, other, (torch.ones(1, 2),))
    assert seen == ["in", "out"]


class Scale(torch.autograd.Function):
    """A function of torch.func's style: ``forward`` without a context, an argument with a default."""

    @staticmethod
    def forward(x: Tensor, by: float = 3.0) -> Tensor:
        return x * by

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.by, None


class ScaleMore(Scale):
    """Inherits ``apply`` over two classes."""


@pytest.mark.parametrize("function", [Scale, ScaleMore])
@pytest.mark.parametrize(("keywords", "by"), [({}, 3.0), ({"by": 5.0}, 5.0)])
def test_a_replaced_apply_reaches_the_function_class_with_its_keywords_and_defaults(
    function: type[Scale], keywords: dict[str, float], by: float
) -> None:
    seen: list[tuple[type, dict[str, Any]]] = []

    def note(original: Any, cls: type, args: Any, kwargs: Any) -> Any:
        seen.append((cls, kwargs))
        return original(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with internals.replaced_functions(apply=note, script=pass_on, checkpoint=pass_on):
        function.apply(x, **keywords).sum().backward()
    assert seen == [(function, keywords)]
    assert x.grad is not None and x.grad.tolist() == [by, by]


def test_compiled_functions_run_as_they_are_written_where_that_is_wanted() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    double = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True)
    with internals.compiled_where(lambda: False):
        assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0)) and not compiled
    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0)) and len(compiled) == 1


def pass_on(original: Any, *rest: Any) -> Any:
    args, kwargs = rest[-2:]
    return original(*args, **kwargs)


def test_both_kinds_of_checkpoint_pass_through_a_replacement_in_every_form_of_the_call() -> None:
    seen: list[str] = []

    def note(name: str) -> Any:
        def call(original: Any, *rest: Any) -> Any:
            seen.append(name)
            return pass_on(original, *rest)

        return call

    x = torch.ones(2, requires_grad=True)
    forms: list[Callable[[], Tensor]] = [
        lambda: torch_checkpoint.checkpoint(torch.sin, x, use_reentrant=False),  # type: ignore[no-any-return]
        lambda: torch_checkpoint.checkpoint_sequential(nn.Sequential(nn.Tanh()), 1, x, use_reentrant=False),  # type: ignore[no-any-return, no-untyped-call]
        lambda: checkpoint_wrapper(nn.Tanh())(x),  # type: ignore[no-any-return]
        lambda: torch_checkpoint.checkpoint(torch.sin, x, use_reentrant=True),  # type: ignore[no-any-return]
    ]
    with internals.replaced_functions(apply=note("apply"), script=pass_on, checkpoint=note("checkpoint")):
        for form in forms:
            form().sum().backward()
    # the last segment of a sequence is never checkpointed
    assert seen == ["checkpoint", "checkpoint", "apply"]


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


def test_optimizers_ask_before_they_step_or_clear_gradients_until_that_is_ended() -> None:
    seen: list[tuple[Any, str]] = []
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    plain = inspect.signature(optimizer.zero_grad)
    end = internals.let_optimizers_ask(lambda each, name: seen.append((each, name)))
    optimizer.step()
    optimizer.zero_grad()
    assert inspect.signature(optimizer.zero_grad) == plain  # accelerate looks for set_to_none
    end()
    optimizer.step()
    optimizer.zero_grad()
    assert seen == [(optimizer, "optimizer.step"), (optimizer, "optimizer.zero_grad")]

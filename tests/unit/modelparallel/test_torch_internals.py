"""The places in torch that the engine reaches into are still there, and are left as they were."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from opensmd.modelparallel import _torch_internals as internals
from opensmd.modelparallel.dry_run import _torch_internals as dry_run
from opensmd.modelparallel.function_modes import _torch_internals as modes

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
        with modes.WithoutMode(mode):
            torch.ones(1) + 1
        assert mode.count == seen
        torch.ones(1) + 1
        assert mode.count > seen
        assert modes.function_modes()[-1] is mode


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


def test_hooks_on_saved_tensors_step_aside_for_transforms_and_come_back() -> None:
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    x = torch.ones(3, requires_grad=True)
    with dry_run.seeing_what_is_saved(pack):
        found = torch.func.grad(lambda each: each.square().sum())(torch.ones(3))
        assert not seen
        x.square()
        assert len(seen) == 1
    assert found.tolist() == [2.0] * 3
    x.square()
    assert len(seen) == 1


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


def test_nodes_of_the_graph_tell_when_they_were_made() -> None:
    weight = torch.ones(2, requires_grad=True)
    before = dry_run.number_of_next_node()
    out = weight * 2
    assert out.grad_fn is not None
    number = dry_run.made_by(out.grad_fn)
    assert number is not None and before <= number < dry_run.number_of_next_node()
    accumulates = out.grad_fn.next_functions[0][0]
    assert accumulates is not None and dry_run.made_by(accumulates) is None


@pytest.mark.parametrize(
    "hook",
    [
        lambda model: model[0].weight.register_hook(lambda gradient: None),
        lambda model: model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None),
        lambda model: model[0].register_full_backward_hook(lambda *_: None),
        lambda model: model.register_full_backward_pre_hook(lambda *_: None),
    ],
)
def test_hooks_that_a_backward_would_call_are_found(hook: Callable[[nn.Sequential], Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert not dry_run.has_backward_hooks(model)
    handle = hook(model)
    assert dry_run.has_backward_hooks(model)
    handle.remove()
    assert not dry_run.has_backward_hooks(model)

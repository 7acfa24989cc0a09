"""Steps that are timed for real: every unit's forward and backward, and a model that is left as it was."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.dry_run.timing.step_clock import StepClock, Watching, losses_in, watching_seconds
from opensmd.modelparallel.dry_run.timing.stopwatch import Stopwatch


class Sleeping(torch.autograd.Function):
    """Takes its time each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None, None


class Layer(nn.Module):
    """Sleeps so long forward, and so long backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return Sleeping.apply(x * self.weight, *self.seconds)  # type: ignore[no-any-return]


def model() -> nn.Sequential:
    return nn.Sequential(Layer(0.004, 0.016), Layer(0.012, 0.002), Layer(0.002, 0.010))


def returning(module: nn.Module) -> Callable[[], Tensor]:
    return lambda: module(torch.ones(2, 4)).sum()  # type: ignore[no-any-return]


def going_backward(module: nn.Module) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss: Tensor = module(torch.ones(2, 4)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(parameter.grad is None for parameter in module.parameters())
        return loss.detach()

    return step


@pytest.mark.usefixtures("sleeping_is_work")
@pytest.mark.parametrize("make", [returning, going_backward])
def test_forwards_and_backwards_of_every_unit_are_timed(make: Callable[[nn.Module], Any]) -> None:
    module = model()
    module[0].weight.grad = torch.full((4,), 7.0)
    trace = capture(module, make(module), times=True)
    assert trace.measured
    for unit, layer in zip(trace.units, module, strict=True):
        forward, backward = layer.seconds
        assert unit.forward_seconds == pytest.approx(forward)
        assert unit.backward_seconds == pytest.approx(backward, abs=1e-4)  # sums of gradients are estimated
    assert torch.equal(module[0].weight.grad, torch.full((4,), 7.0))
    assert module[1].weight.grad is None


def test_no_backward_runs_that_would_call_hooks_of_the_script() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    called = []
    module[0].weight.register_hook(called.append)
    trace = capture(module, lambda: module(torch.ones(2, 4)).sum(), times=True)
    assert trace.measured and not called
    assert all(unit.backward_seconds > 0 for unit in trace.units)


def test_gradients_of_the_scripts_own_tensors_stay_away() -> None:
    module = model()
    x = torch.ones(2, 4, requires_grad=True)
    capture(module, lambda: module(x).sum(), times=True)
    assert x.grad is None


def test_the_loss_of_a_step_is_the_first_number_with_a_gradient() -> None:
    weight = torch.ones((), requires_grad=True)
    loss, logits = weight * 2, weight * torch.ones(3)
    assert losses_in({"logits": logits, "loss": loss, "other": weight * 3}) == [loss]
    assert losses_in((logits, 1.0)) == []


def test_what_it_takes_to_watch_calls_and_nodes_is_no_work_of_the_model() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4))
    clock = StepClock(Stopwatch())
    with clock.follow({part: name for name, part in module.named_modules()}):
        clock.run_backward(torch.autograd.backward, [module(torch.ones(2, 4)).sum()], {})
    assert clock.calls_of == {0: 2, 1: 1, 2: 1}  # the model's own call begins with its first layer
    assert clock.nodes_of == {0: 1, 2: 1}  # where the backward of another unit begins
    plain = clock.taken(Watching(0.0, 0.0))
    assert plain.forward == clock.seconds and plain.backward == clock.backward
    less = clock.taken(Watching(1e-7, 2e-7))
    assert less.backward is not None
    assert less.forward[0] == pytest.approx(clock.seconds[0] - 2e-7)
    assert less.backward[2] == pytest.approx(clock.backward[2] - 2e-7 * clock.nodes_of[2])
    nothing = clock.taken(Watching(1.0, 1.0))
    assert nothing.forward == {0: 0.0, 1: 0.0, 2: 0.0}
    assert nothing.backward == dict.fromkeys(clock.backward, 0.0) and nothing.with_sums


def test_a_step_without_a_backward_has_no_seconds_of_one() -> None:
    clock = StepClock(Stopwatch())
    assert clock.taken(watching_seconds()).backward is None


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_watching_takes_some_time_for_calls_and_nodes(mode: Callable[[], Any]) -> None:
    with mode():  # of the first step, which may be an evaluation
        watching = watching_seconds()
    assert watching.call > 0 and watching.node >= 0


@pytest.mark.usefixtures("sleeping_is_work")
@pytest.mark.parametrize(("seconds", "runs"), [(0.002, 1 + 8), (0.25, 1 + 2)])
def test_short_steps_run_more_often(seconds: float, runs: int) -> None:
    module, calls = Layer(seconds, 0.0), []

    def step() -> Tensor:
        calls.append(1)
        return module(torch.ones(2, 4)).sum()

    capture(module, step, times=True)
    assert len(calls) == 1 + runs  # the dry run; one that warms up, and those that count


@pytest.mark.parametrize("has_hook", [False, True])
def test_the_graph_of_a_timed_run_is_gone_before_the_next(has_hook: bool) -> None:
    module, graphs = nn.Linear(4, 4), []
    if has_hook:  # then no backward runs, and the graph keeps what it would need
        module.weight.register_hook(lambda gradient: gradient)

    def step() -> Tensor:
        assert not any(graph() for graph in graphs)
        loss: Tensor = module(torch.ones(2, 4)).sum()
        hook = partial(torch.mul, other=1.0)
        loss.register_hook(hook)
        graphs.append(weakref.ref(hook))
        return loss

    capture(module, step, times=True)
    assert len(graphs) > 2

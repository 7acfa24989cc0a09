"""Steps that run again without their script: when, what runs, and that nothing else is touched."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from opensmd.modelparallel.dry_run import measuring
from opensmd.modelparallel.dry_run.capture import _observe_fake, capture
from opensmd.modelparallel.dry_run.module_tree import ModuleTree
from opensmd.modelparallel.dry_run.timing import replay
from opensmd.modelparallel.dry_run.timing.replay import Replay
from opensmd.modelparallel.dry_run.timing.step_record import StepRecord

aten = torch.ops.aten


def pictures(*more: nn.Module) -> tuple[nn.Sequential, list[int], Callable[[], Tensor]]:
    """A model of convolutions, a list that gets an item in each run of its step, and the step."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), *more, nn.Flatten(), nn.Linear(8 * 64, 4))
    runs: list[int] = []

    def step() -> Tensor:
        runs.append(1)
        return F.cross_entropy(model(torch.ones(2, 3, 8, 8)), torch.zeros(2, dtype=torch.long))

    return model, runs, step


def draws(func: torch._ops.OpOverload, *args: object) -> bool:
    """Whether an operation counts as one that draws random numbers."""
    record = StepRecord()
    record.note(func, args, {}, func(*args), 0, differentiated=True)
    return record.draws


def test_convolutions_are_timed_without_running_the_step_again() -> None:
    model, runs, step = pictures()
    assert not capture(model, step).measured
    runs.clear()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trace = capture(model, step, operations=True)
    assert trace.measured and len(runs) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    trained = [unit for unit in trace.units if unit.module in ("", "0", "1", "3", "5")]
    assert trained and all(unit.forward_seconds > 0 and unit.backward_seconds > 0 for unit in trained)
    assert all(0 <= unit.late_seconds <= unit.backward_seconds for unit in trace.units)


class Scaling(nn.Module):
    """Multiplies by a number that it draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draw()


def test_nothing_is_timed_where_a_cut_decides_which_random_numbers_are_drawn() -> None:
    model, _, step = pictures(nn.Dropout(0.5))
    assert not capture(model, step, operations=True).measured
    model.eval()
    assert capture(model, step, operations=True).measured


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_numbers_of_python_and_numpy_count_where_the_model_draws_them(draw: Callable[[], float]) -> None:
    model, _, step = pictures()
    assert capture(model, lambda: step() * draw(), operations=True).measured  # every rank draws this
    model, _, step = pictures(Scaling(draw))
    assert not capture(model, step, operations=True).measured


def test_what_an_operation_copies_for_its_backward_is_copied_once() -> None:
    """Torch copies what hardtanh overwrites, within that operation, and again whenever it runs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU6(inplace=True))

    def step() -> Tensor:
        scaled = model(torch.ones(2, 4)) * 1.0
        return (scaled.clone() + scaled.clone().mul_(2.0)).sum()  # the script's own copies

    observer = _observe_fake(model, step, ModuleTree(model), ModuleTree(model).followed())
    functions = [operation.func for operation, _ in observer.record.operations()]
    assert functions.count(aten.clone.default) == 2


class Attention(nn.Module):
    """Attends over the places of a picture."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        places = x.flatten(2).transpose(1, 2).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(places, places, places, dropout_p=self.dropout)
        return mixed.squeeze(1).transpose(1, 2).reshape_as(x)


def test_fused_attention_without_dropout_draws_no_random_numbers() -> None:
    model, _, step = pictures(Attention(0.0))
    assert capture(model, step, operations=True).measured
    model, _, step = pictures(Attention(0.5))
    assert not capture(model, step, operations=True).measured
    query = torch.ones(1, 1, 4, 8, requires_grad=True)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not draws(attention, query, query, query)
    assert not draws(attention, query, query, query, 0.0, True)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_nothing_is_timed_where_runs_shall_be_alike() -> None:
    model, _, step = pictures()
    assert not capture(model, step, operations=True).measured


@pytest.mark.parametrize(("rows", "timed"), [(8, False), (1 << 14, True), (1 << 20, False)])
def test_steps_without_convolutions_are_timed_if_they_are_short_but_not_tiny(rows: int, timed: bool) -> None:
    linear = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.ones(1, 64).expand(rows, 64)
    assert capture(linear, lambda: linear(x).sum(), operations=True).measured == timed


def test_nothing_is_timed_where_there_is_no_data() -> None:
    model, _, step = pictures()
    assert not capture(model, step, operations=True, has_data=False).measured


@pytest.mark.parametrize(("seconds", "counted"), [(0.01, 8), (0.2, 2), (0.6, 2)])
def test_long_steps_run_twice_and_short_ones_for_half_a_second(seconds: float, counted: int) -> None:
    runs = iter([SimpleNamespace(all_seconds=seconds, number=number) for number in range(20)])
    found = measuring._counting(cast("Any", runs), warm_up_below=measuring.LONG)
    first = 0 if seconds > measuring.LONG else 1
    assert [each.number for each in cast("Any", found)] == list(range(first, first + counted))


def test_the_calling_threads_modes_reach_no_replay() -> None:
    model, _, step = pictures()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert capture(model, step, operations=True).measured
        assert torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
    with torch.inference_mode():
        assert capture(model, step, times=True).measured  # forward alone


def test_a_step_that_needs_a_value_runs_once_for_real_and_its_operations_again() -> None:
    model, runs, step = pictures()
    trace = capture(model, lambda: step() if model[0].weight.detach().sum().item() else None, operations=True)
    assert trace.measured and len(runs) == 1


def test_what_may_not_fit_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)])
    x = torch.ones(2, 8, 32, 32)
    assert capture(layers, lambda: layers(x).sum(), operations=True).measured
    step = partial(checkpoint, layers, x, use_reentrant=False)
    assert not capture(layers, lambda: step().sum(), operations=True).measured
    free = type(psutil.virtual_memory())._make([0] * len(psutil.virtual_memory()))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert not capture(layers, lambda: layers(x).sum(), operations=True).measured


class Writing(nn.Module):
    """Changes a weight, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight[:4].mul_(0.5)
        return x * self.weight.view(8, 1, 1)


class Failing(nn.Module):
    """Fails where there is data."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.linalg.cholesky(-torch.eye(8))


@torch.library.custom_op("opensmd_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return x.clone()


class OfTheScript(nn.Module):
    """Calls an operation of the script's own, which might communicate."""

    def forward(self, x: Tensor) -> Tensor:
        return x + doubled(x.detach())  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Writing, Failing, OfTheScript])
def test_what_cannot_run_again_or_would_change_something_is_estimated(kind: type[nn.Module]) -> None:
    model, _, step = pictures(kind())
    assert not capture(model, step, operations=True).measured
    assert all(bool((each.weight == 1).all()) for each in model if isinstance(each, Writing))


def test_random_numbers_drawn_before_the_model_do_not_depend_on_the_cut() -> None:
    model, _, step = pictures()
    generator = torch.Generator().manual_seed(3)
    assert capture(model, lambda: torch.rand(()) + step(), operations=True).measured
    state = generator.get_state()
    assert not capture(model, lambda: torch.rand((), generator=generator) + step(), operations=True).measured
    assert torch.equal(generator.get_state(), state)


class Cut(torch.autograd.Function):
    """Computes outside the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach() * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def test_backwards_that_operations_do_not_show_are_estimated() -> None:
    class Cutting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Cut.apply(x)  # type: ignore[no-untyped-call,no-any-return]

    model, _, step = pictures(Cutting())
    trace = capture(model, step, operations=True)
    assert trace.measured
    assert all(unit.backward_seconds > 0 for unit in trace.units if unit.module != "4")


class Everything(nn.Module):
    """Writes in place, into views and buffers, shares a weight, and leaves a result out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        self.second(x)  # left out
        x = torch.cat([x[:, 1:] * self.frozen[:3].view(3, 1, 1), self.second(x)[:, :1]], 1)
        y = x.clone()
        y[:, 0].mul_(2)
        with torch.no_grad():
            self.norm.weight_sum = self.norm.weight.sum()
        index = torch.arange(4).flip(0)
        return F.linear(y[:, index].flatten(2), torch.eye(36)) + self.second.weight.sum()


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that compute something, and notes how many results live at once, at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[str] = Counter()
        self.most = 0
        self._alive: set[weakref.ref[Tensor]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations[str(func)] += 1
            self._alive.update(weakref.ref(each) for each in tree_leaves(out) if isinstance(each, Tensor))
            self._alive = {each for each in self._alive if each() is not None}
            self.most = max(self.most, len(self._alive))
        return out


def recorded(model: nn.Module, step: Callable[[], Tensor]) -> StepRecord:
    """What an observer of a fake run has recorded."""
    tree = ModuleTree(model)
    return _observe_fake(model, step, tree, tree.followed()).record


def test_a_replay_computes_what_the_step_computes_and_keeps_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Everything()
    x = torch.rand(2, 3, 8, 8)
    record = recorded(model, lambda: model(x).square().mean())
    assert record.is_complete
    with Counted() as in_step:
        model(x).square().mean().backward()  # type: ignore[no-untyped-call]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(replay, "_undisturbed", contextlib.nullcontext)
    with Counted() as in_replay:
        clock = next(Replay(record).runs())
    copies = Counter({"aten.clone.default": 5, "aten.ones_like.default": 1})  # of the input and buffers
    assert in_replay.operations - in_step.operations <= copies
    unused = Counter({"aten.empty.memory_format": 1})
    assert in_step.operations - in_replay.operations <= unused
    assert in_replay.most <= in_step.most + copies.total()
    assert clock.went_backward and clock.backward.keys() == {0, 1, 2}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

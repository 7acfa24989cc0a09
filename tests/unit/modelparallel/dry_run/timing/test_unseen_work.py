"""Signs of work that estimates miss: operations that are not torch's own, and time that passes between."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from opensmd.modelparallel.dry_run.timing.unseen_work import (
    BETWEEN_OPERATIONS,
    LEAST_SECONDS,
    UnseenWork,
    outweighs,
)

RELU = torch.ops.aten.relu.default


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


class Run:
    """A run with a clock that is set by hand."""

    def __init__(self) -> None:
        self.unit, self.seconds = 0, 0.0
        self.work = UnseenWork(lambda: self.unit, lambda: self.seconds)

    def operation(self, takes: float, func: Any = RELU) -> None:
        since, self.seconds = self.seconds, self.seconds + takes
        self.work.operation(func, self.unit, since)

    def suspected(self, **estimated: float) -> set[int]:
        return self.work.units({0: self.seconds}, defaultdict(float, {0: estimated.get("estimated", 0.0)}))


def test_time_in_operations_is_no_sign() -> None:
    run = Run()
    run.operation(takes=10.0)
    assert run.suspected() == set()


def test_times_of_several_operations_and_looks_add_up() -> None:
    run = Run()
    for _ in range(2):
        run.operation(takes=5.0)
        run.seconds += 5.0
        run.work.looked_on(0, since=run.seconds - 5.0)
    assert run.suspected() == set()


def test_an_operation_whose_work_torch_can_count_is_no_sign() -> None:
    with torch.library._scoped_library("opensmd_counted_work", "FRAGMENT") as library:
        library.define("counted(Tensor x) -> Tensor")
        packet = torch.ops.opensmd_counted_work.counted
        flop_registry[packet] = lambda *_, **__: 1
        try:
            run = Run()
            run.operation(takes=0.0, func=packet.default)
        finally:
            del flop_registry[packet]
    assert run.suspected() == set()


def test_an_autograd_function_of_torch_is_no_sign() -> None:
    class OfTorch(Doubled):
        __module__ = "torch.somewhere"

    run = Run()
    with run.work.watching_functions():
        OfTorch.apply(torch.ones(2))
    assert run.suspected() == set()


def test_a_function_within_one_that_gradients_go_through_is_differentiated_with_it() -> None:
    run, seen = Run(), []

    class Inner(Doubled):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(run.work.differentiates)
            return 2 * x

    class Outer(Doubled):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            result: Tensor = Inner.apply(x.detach())
            return result

    with run.work.watching_functions():
        Outer.apply(torch.ones(2, requires_grad=True))
    assert seen == [True]


def test_time_between_operations_is_a_sign_beyond_what_python_takes() -> None:
    run = Run()
    run.operation(takes=0.0)
    run.seconds += LEAST_SECONDS + 2 * BETWEEN_OPERATIONS - 1e-6
    assert run.suspected() == set()
    run.seconds += 2e-6
    assert run.suspected() == {0}


def test_many_operations_may_have_much_time_between_them() -> None:
    run = Run()
    for _ in range(100):
        run.operation(takes=0.0)
        run.seconds += BETWEEN_OPERATIONS
    assert run.suspected() == set()


def test_what_is_little_beside_all_other_work_is_no_sign() -> None:
    run = Run()
    run.seconds += 1.0
    assert run.suspected(estimated=30.0) == set()
    assert run.suspected(estimated=10.0) == {0}


def test_the_time_of_who_watches_does_not_count() -> None:
    run = Run()
    run.seconds += 1.0
    run.work.looked_on(0, since=0.0)
    assert run.suspected() == set()


def test_an_operation_that_is_not_of_torch_is_a_sign() -> None:
    with torch.library._scoped_library("opensmd_unseen_work", "FRAGMENT") as library:
        library.define("shifted(Tensor x) -> Tensor")
        run = Run()
        run.operation(takes=0.0, func=torch.ops.opensmd_unseen_work.shifted.default)
    assert run.suspected() == {0}


def test_an_autograd_function_of_the_script_is_a_sign_and_differentiates_what_needs_a_gradient() -> None:
    run, seen = Run(), []

    class Watched(Doubled):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(run.work.differentiates)
            return 2 * x

    with run.work.watching_functions():
        Watched.apply(torch.ones(2))
        Watched.apply(torch.ones(2, requires_grad=True))
        with torch.no_grad():
            Watched.apply(torch.ones(2, requires_grad=True))
    assert seen == [False, True, False] and not run.work.differentiates
    assert run.suspected() == {0}


def test_what_runs_before_the_model_is_of_no_unit() -> None:
    run = Run()
    run.unit = -1
    with run.work.watching_functions():
        Doubled.apply(torch.ones(2))
    assert run.work.units({-1: 100.0}, {}) == set()


@pytest.mark.parametrize(("measured", "believed"), [(0.0309, False), (0.0311, True)])
def test_a_clock_is_believed_if_it_is_far_off_the_estimate(measured: float, believed: bool) -> None:
    assert outweighs(measured, estimated=0.01) is believed

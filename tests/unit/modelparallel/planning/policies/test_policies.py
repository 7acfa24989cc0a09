"""The order in which a rank takes its microbatches, simulated without ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from opensmd.modelparallel.planning.policies.fixed_order import FixedOrder
from opensmd.modelparallel.planning.policies.policy import Choice, Policy, Progress, Standing
from opensmd.modelparallel.planning.policies.table_order import TableOrder
from opensmd.modelparallel.planning.schedules.fill_drain import fill_drain
from opensmd.modelparallel.planning.schedules.one_forward_one_backward import one_forward_one_backward


def alternating(size: int, microbatches: int) -> TableOrder:
    """Forwards and backwards in turn, with so many microbatches in between at most."""
    row = one_forward_one_backward(size, microbatches).rows[0]
    return TableOrder(row, most_active=math.inf, window=size)


def forwards_first(microbatches: int) -> TableOrder:
    return TableOrder(fill_drain(1, microbatches).rows[0], most_active=math.inf, forwards_first=True)


def pick(policy: Policy, progress: list[Progress], ready: Callable[[int], bool]) -> int | None:
    choice = policy.pick(Standing(progress, [0] * len(progress), []), ready)
    assert choice is None or choice.weights is None
    return None if choice is None else choice.microbatch


def order(policy: Policy, microbatches: int, *, backward: bool = True) -> list[tuple[str, int]]:
    """What one rank does if everything it waits for is there."""
    progress = [Progress.NEW] * microbatches
    done: list[tuple[str, int]] = []
    while any(each is not Progress.DONE for each in progress):
        chosen = pick(policy, progress, lambda _: True)
        assert chosen is not None, (progress, done)
        if progress[chosen] is Progress.NEW:
            done.append(("forward", chosen))
            progress[chosen] = Progress.AT_BACKWARD if backward else Progress.DONE
        else:
            done.append(("backward", chosen))
            progress[chosen] = Progress.DONE
    return done


def most_in_flight(events: list[tuple[str, int]]) -> int:
    now = most = 0
    for kind, _ in events:
        now += 1 if kind == "forward" else -1
        most = max(most, now)
    return most


def test_simple_does_all_forwards_then_all_backwards() -> None:
    for policy in (forwards_first(3), FixedOrder(3, 3)):
        assert order(policy, 3) == [
            *(("forward", each) for each in range(3)),
            *(("backward", each) for each in range(3)),
        ]


def test_a_fixed_order_alternates_after_its_window() -> None:
    assert order(FixedOrder(2, 4), 4) == [
        ("forward", 0),
        ("forward", 1),
        ("backward", 0),
        ("forward", 2),
        ("backward", 1),
        ("forward", 3),
        ("backward", 2),
        ("backward", 3),
    ]


def test_what_comes_first_in_the_row_goes_first_if_it_can() -> None:
    """The row: F0 F1 F2 F3 B0 F4 B1 F5 B2 ..."""
    policy = alternating(4, 6)
    progress = [
        Progress.AT_BACKWARD,
        Progress.AT_BACKWARD,
        Progress.FORWARD,
        Progress.NEW,
        *[Progress.NEW] * 2,
    ]
    assert pick(policy, progress, lambda _: True) == 2
    assert pick(policy, progress, lambda each: each != 2) == 3
    progress[3] = Progress.AT_BACKWARD
    assert pick(policy, progress, lambda each: each != 2) == 0
    assert pick(policy, progress, lambda each: each == 1) == 1
    assert pick(policy, progress, lambda _: False) is None
    progress[0] = Progress.DONE
    assert pick(policy, progress, lambda each: each != 2) == 4  # in turn, although a backward could go on


def test_weight_gradients_wait_for_idle_time_or_for_memory() -> None:
    row = one_forward_one_backward(1, 4).rows[0]
    done = [Progress.DONE, Progress.DONE, Progress.NEW, Progress.NEW]
    for kept, expected in ((3, Choice(2)), (2, Choice(0, 0))):
        policy = TableOrder(row, most_active=4, most_kept=kept)
        assert policy.pick(Standing(done, [0] * 4, [(0, 0), (1, 0)]), lambda _: True) == expected
    policy = TableOrder(row, most_active=4, most_kept=4, window=1)
    waiting = [Progress.DONE, Progress.AT_BACKWARD, Progress.NEW, Progress.NEW]
    for ready, expected in ((True, Choice(1)), (False, Choice(0, 0))):
        assert policy.pick(Standing(waiting, [0] * 4, [(0, 0)]), lambda _, ready=ready: ready) == expected


def test_a_full_window_waits() -> None:
    progress = [Progress.AT_BACKWARD, Progress.FORWARD, Progress.NEW]
    assert pick(alternating(2, 3), progress, lambda _: False) is None


def test_forward_only_steps_come_to_an_end() -> None:
    for policy in (alternating(1, 5), FixedOrder(1, 5)):
        assert order(policy, 5, backward=False) == [("forward", each) for each in range(5)]


@given(simple=st.booleans(), size=st.integers(1, 6), microbatches=st.integers(1, 9), fixed=st.booleans())
def test_every_microbatch_goes_forward_and_backward_once_within_the_window(
    simple: bool, size: int, microbatches: int, fixed: bool
) -> None:
    if fixed:
        policy: Policy = FixedOrder(microbatches if simple else size, microbatches)
    else:
        policy = forwards_first(microbatches) if simple else alternating(size, microbatches)
    events = order(policy, microbatches)
    for kind in ("forward", "backward"):
        assert [each for what, each in events if what == kind] == list(range(microbatches))
    if not simple:
        assert most_in_flight(events) <= size

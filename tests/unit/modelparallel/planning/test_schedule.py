"""The order in which a rank takes its microbatches, simulated without ranks."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opensmd.modelparallel.planning.schedule import FixedOrder, Policy, Progress, ReadyFirst, window

Pipeline = Literal["interleaved", "simple"]


def order(policy: Policy, microbatches: int, *, backward: bool = True) -> list[tuple[str, int]]:
    """What one rank does if everything it waits for is there."""
    progress = [Progress.NEW] * microbatches
    done: list[tuple[str, int]] = []
    while any(each is not Progress.DONE for each in progress):
        chosen = policy.pick(progress, lambda _: True)
        assert chosen is not None, (progress, done)
        if progress[chosen] is Progress.NEW:
            done.append(("forward", chosen))
            progress[chosen] = Progress.AT_BACKWARD if backward else Progress.DONE
        else:
            done.append(("backward", chosen))
            progress[chosen] = Progress.DONE
    return done


def most_under_way(events: list[tuple[str, int]]) -> int:
    now = most = 0
    for kind, _ in events:
        now += 1 if kind == "forward" else -1
        most = max(most, now)
    return most


def test_simple_does_all_forwards_then_all_backwards() -> None:
    for policy in (ReadyFirst("simple", 2), FixedOrder("simple", 2, 3)):
        assert order(policy, 3) == [
            *(("forward", each) for each in range(3)),
            *(("backward", each) for each in range(3)),
        ]


def test_a_fixed_order_alternates_after_its_window() -> None:
    assert order(FixedOrder("interleaved", 2, 4), 4) == [
        ("forward", 0),
        ("forward", 1),
        ("backward", 0),
        ("forward", 2),
        ("backward", 1),
        ("forward", 3),
        ("backward", 2),
        ("backward", 3),
    ]


def test_backwards_go_first_and_new_microbatches_last() -> None:
    policy = ReadyFirst("interleaved", 4)
    progress = [Progress.FORWARD, Progress.AT_BACKWARD, Progress.BACKWARD, Progress.NEW]
    assert policy.pick(progress, lambda _: True) == 2
    assert policy.pick(progress, lambda each: each != 2) == 1
    assert policy.pick(progress, lambda each: each == 0) == 0
    assert policy.pick(progress, lambda _: False) == 3


def test_a_full_window_waits() -> None:
    progress = [Progress.AT_BACKWARD, Progress.FORWARD, Progress.NEW]
    assert ReadyFirst("interleaved", 2).pick(progress, lambda _: False) is None


def test_forward_only_steps_come_to_an_end() -> None:
    for policy in (ReadyFirst("interleaved", 1), FixedOrder("interleaved", 1, 5)):
        assert order(policy, 5, backward=False) == [("forward", each) for each in range(5)]


@given(
    pipeline=st.sampled_from(["interleaved", "simple"]),
    size=st.integers(1, 6),
    microbatches=st.integers(1, 9),
    fixed=st.booleans(),
)
def test_every_microbatch_goes_forward_and_backward_once_within_the_window(
    pipeline: Pipeline, size: int, microbatches: int, fixed: bool
) -> None:
    policy: Policy = FixedOrder(pipeline, size, microbatches) if fixed else ReadyFirst(pipeline, size)
    events = order(policy, microbatches)
    for kind in ("forward", "backward"):
        assert [each for what, each in events if what == kind] == list(range(microbatches))
    if pipeline == "interleaved":
        assert most_under_way(events) <= size


@pytest.mark.parametrize(
    ("chain", "active", "expected"),
    [(True, 6, [5, 4, 3, 1]), (False, 6, [4, 4, 4, 4]), (True, 2, [2, 2, 2, 1]), (False, 1, [1, 1, 1, 1])],
)
def test_the_window_of_each_of_four_stages(chain: bool, active: int, expected: list[int]) -> None:
    found = [window(partitions=4, stage=s, chain=chain, active_microbatches=active) for s in range(4)]
    assert found == expected

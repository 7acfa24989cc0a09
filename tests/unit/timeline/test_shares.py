"""The shares of time: computing, waiting, in collectives."""

from __future__ import annotations

import pytest

from opensmd.timeline.shares import shares
from opensmd.timeline.span import PIPELINE, Span
from tests.unit.timeline.small_timeline import collective, small_timeline


def test_a_collective_waits_until_its_last_rank_has_entered() -> None:
    first, last = shares(small_timeline(), 100).values()
    assert (first.busy, first.waiting, first.moving, first.bubble) == pytest.approx((0.4, 0.3, 0.1, 0.2))
    assert (last.busy, last.waiting, last.moving, last.bubble) == pytest.approx((0.5, 0.0, 0.1, 0.4))


def test_a_collective_beside_computation_costs_nothing() -> None:
    spans = [Span(PIPELINE, "backward", 0, 100, 0), collective(20, 60)]
    assert shares({0: spans}, 100)[0].busy == pytest.approx(1.0)


def test_spans_that_overlap_are_counted_once() -> None:
    spans = [collective(0, 50, "a"), collective(20, 60, "b"), Span(PIPELINE, "wait", 40, 80)]
    found = shares({0: spans}, 100)[0]
    assert found.moving == pytest.approx(0.6)
    assert found.bubble == pytest.approx(0.2)

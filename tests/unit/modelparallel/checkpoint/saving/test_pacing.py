"""When a save beside training rests, by a clock that tests wind."""

from __future__ import annotations

import pytest

from opensmd.modelparallel.checkpoint.saving import pacing
from opensmd.modelparallel.checkpoint.saving.pacing import LONGEST, LOOK, SHARE, Pace


class Clock:
    """The time, and how much of it a thread has worked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.work = 0.0
        monkeypatch.setattr(pacing, "time", self)
        self.work = 1000.0  # of the thread that trains
        self.others_wait = False
        self.pace = Pace(lambda: self.others_wait)
        self.work = 0.0
        monkeypatch.setattr(self.pace._hurried, "wait", self.rest)

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.work

    def rest(self, seconds: float) -> bool:
        if not self.pace._hurried.is_set():
            self.now += seconds
        return self.pace._hurried.is_set()

    def save(self, seconds: float, *, share: float) -> float:
        """Write for so long on a core that leaves this share of itself; returns how long it took."""
        start, pieces = self.now, 1000
        for _ in range(pieces):
            self.work += seconds / pieces
            self.now += seconds / pieces / share
            self.pace()
        return self.now - start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_on_a_free_core_it_never_rests(clock: Clock) -> None:
    assert clock.save(5.0, share=1.0) == pytest.approx(5.0)


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_on_a_busy_core_it_takes_its_share(clock: Clock, share: float) -> None:
    assert clock.save(2.0, share=share) == pytest.approx(2.0 / SHARE, rel=0.01)


def test_on_a_core_that_leaves_less_it_does_not_rest_besides(clock: Clock) -> None:
    assert clock.save(2.0, share=SHARE / 2) == pytest.approx(4.0 / SHARE)


def test_when_somebody_waits_it_rests_no_more(clock: Clock) -> None:
    clock.pace.hurry()
    assert clock.save(2.0, share=0.5) == pytest.approx(4.0)


def test_when_another_rank_waits_it_soon_rests_no_more(clock: Clock) -> None:
    clock.save(0.1, share=0.5)
    clock.others_wait = True
    assert clock.save(2.0, share=0.5) < 4.0 + 2 * LOOK


def test_a_long_save_ends_in_time(clock: Clock) -> None:
    assert clock.save(100.0, share=0.5) < LONGEST + 200.0

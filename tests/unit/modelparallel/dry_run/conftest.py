"""A machine on which work takes exactly its time: what clocks say of it can be told in advance."""

from __future__ import annotations

import time

import pytest

from opensmd.modelparallel.dry_run.timing.stopwatch import Stopwatch


@pytest.fixture
def sleeping_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """``time.sleep`` returns at once, and the stopwatch shows the seconds of all sleeps and nothing else."""
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(Stopwatch, "now", lambda _: slept)

"""Signs of life of a rank that works for long: several within the timeout of those that wait."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from opensmd.modelparallel.ranks import heartbeat

BEATS = 3


@pytest.mark.parametrize(
    ("timeout", "pause"), [(6.0, 1.5), (1800.0, heartbeat.MOST_SECONDS), (None, heartbeat.MOST_SECONDS)]
)
def test_several_signs_of_life_come_within_the_groups_timeout(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None, pause: float
) -> None:
    pauses, signs = list[float](), list[int]()

    class Ended:
        """Set after some beats, however long the pauses between them are to be."""

        def wait(self, seconds: float) -> bool:
            pauses.append(seconds)
            return len(pauses) > BEATS

        def set(self) -> None:
            pass

    limit = None if timeout is None else timedelta(seconds=timeout)
    monkeypatch.setattr(heartbeat, "threading", SimpleNamespace(Event=Ended, Thread=threading.Thread))
    monkeypatch.setattr(heartbeat, "dist", SimpleNamespace(get_rank=lambda group: 0))
    monkeypatch.setattr(heartbeat, "timeout_of", lambda group: limit)
    monkeypatch.setattr(heartbeat, "_signal", lambda group, source, mine: signs.append(mine))
    group: Any = None

    with heartbeat.keep_waiting(group):
        pass

    assert pauses == [pause] * (BEATS + 1)
    assert signs == [heartbeat._AT_WORK] * BEATS + [heartbeat._DONE]

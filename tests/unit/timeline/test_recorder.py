"""Nothing is recorded that was not asked for."""

from __future__ import annotations

import pytest

from opensmd.timeline.recorder import VARIABLE, recorder


def test_without_the_variable_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.cache_clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    assert recorder(0) is None
    recorder.cache_clear()

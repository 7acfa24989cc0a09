"""What torch's own import asks of this package."""

from __future__ import annotations

from opensmd.collectives.lookup import TIMELINE
from opensmd.timeline.recorder import VARIABLE


def test_the_variable_that_asks_for_a_timeline_is_the_recorders() -> None:
    assert TIMELINE == VARIABLE

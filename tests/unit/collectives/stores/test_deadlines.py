"""Calls that end in time."""

from __future__ import annotations

import threading
import time

import pytest

from opensmd.collectives.stores.deadlines import call_within
from tests.support.patience import PATIENCE


def test_results_and_errors_of_the_call_come_through() -> None:
    assert call_within(PATIENCE, lambda: [1]) == [1]
    assert call_within(PATIENCE, lambda: None) is None
    with pytest.raises(KeyError, match="gone"):
        call_within(PATIENCE, lambda: {}["gone"])


@pytest.mark.parametrize("seconds", [0.05, 0.0, -1.0])
def test_a_call_that_does_not_return_is_left_behind(seconds: float) -> None:
    released = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within"):
        call_within(seconds, released.wait)
    released.set()  # its thread ends


def test_what_a_look_raises_counts_even_if_it_has_let_the_call_return() -> None:
    released, returned = threading.Event(), threading.Event()

    def call() -> None:
        released.wait(PATIENCE)
        returned.set()

    def look() -> None:
        released.set()
        returned.wait(PATIENCE)
        time.sleep(0.05)  # until the result has been handed over
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        call_within(PATIENCE, call, look)

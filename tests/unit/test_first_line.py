"""Errors in a line of other messages."""

from __future__ import annotations

import pytest

from opensmd.first_line import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("\n no route to host \nException raised from connect\n"), "no route to host"),
        (MemoryError(), "MemoryError"),
        (OSError(" \n"), "OSError"),
    ],
)
def test_an_error_is_told_in_a_line_even_if_it_says_nothing(error: BaseException, line: str) -> None:
    assert first_line(error) == line

"""Warnings that are given once."""

from __future__ import annotations

import warnings

from opensmd.said_once import warn_once


def test_a_text_is_said_once_and_another_is_too() -> None:
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for text in ("this is said once", "this is said once", "so is this"):
            warn_once(text, RuntimeWarning)
    assert [str(warning.message) for warning in said] == ["this is said once", "so is this"]
    assert {(warning.category, warning.filename) for warning in said} == {(RuntimeWarning, __file__)}

"""Whole numbers from the environment."""

from __future__ import annotations

import pytest

from opensmd.environment.numbers import number


def test_the_first_variable_that_is_set_counts() -> None:
    environ = {"FIRST": "", "SECOND": "-2", "THIRD": "3"}
    assert number(environ, ("FIRST", "SECOND", "THIRD")) == -2
    assert number(environ, ("FIRST", "MISSING")) is None


@pytest.mark.parametrize("text", ["two", "1.0", "0x1", "1 2"])
def test_what_is_no_whole_number_is_refused_with_the_variable(text: str) -> None:
    with pytest.raises(ValueError, match=rf"the environment variable RANK is {text!r}; a whole number"):
        number({"RANK": text}, ("RANK",))

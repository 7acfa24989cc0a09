"""The two sessions in which all tests run: their folders, and one exit status for both."""

from __future__ import annotations

import pytest

from tests.__main__ import NO_TESTS, SECOND, worst
from tests.support.ranks import ROOT


def test_the_folders_of_the_second_session_hold_tests() -> None:
    assert all(list((ROOT / folder).glob("test_*.py")) for folder in SECOND)


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ([0, 0], 0),
        ([0, 1], 1),
        ([2, 0], 2),
        ([-9, 0], 9),
        ([0, NO_TESTS], 0),
        ([1, NO_TESTS], 1),
        ([NO_TESTS, NO_TESTS], NO_TESTS),
    ],
)
def test_both_sessions_must_pass_and_one_of_them_must_have_tests(statuses: list[int], status: int) -> None:
    assert worst(statuses) == status

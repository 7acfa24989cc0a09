"""Variables of the original libraries that have no effect."""

from __future__ import annotations

import warnings

import pytest

from opensmd.environment.ignored import ignored, warn_of_ignored

SET = {"SMDDP_AG_SORT_METHOD": "x", "SMP_DISABLE_D2D": "1", "SMDDP_OTHER": "1", "PATH": "/bin"}


def test_all_that_are_set_are_named_in_one_warning_on_the_first_rank() -> None:
    assert ignored(SET) == ["SMDDP_AG_SORT_METHOD", "SMP_DISABLE_D2D"]
    with pytest.warns(UserWarning, match="no effect here: SMDDP_AG_SORT_METHOD, SMP_DISABLE_D2D. Unset them"):
        warn_of_ignored(SET)
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_ignored({**SET, **place})
        warn_of_ignored({"PATH": "/bin"})
        warn_of_ignored({**place, "WORLD_SIZE": "1"})  # a spawned rank that has set its RANK alone

"""How many microbatches may be in flight on a rank."""

from __future__ import annotations

import pytest

from opensmd.modelparallel.planning.policies.limits import window


@pytest.mark.parametrize(
    ("chain", "active", "expected"),
    [
        (True, 6, [6, 5, 3, 1]),
        (True, 5, [5, 4, 3, 1]),
        (False, 6, [4, 4, 4, 4]),
        (True, 2, [2, 2, 2, 1]),
        (False, 1, [1, 1, 1, 1]),
    ],
)
def test_the_window_of_each_of_four_stages(chain: bool, active: int, expected: list[int]) -> None:
    found = [window(partitions=4, stage=s, chain=chain, active_microbatches=active) for s in range(4)]
    assert found == expected

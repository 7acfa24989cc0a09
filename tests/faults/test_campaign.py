"""A short campaign of random faults in every run; ``python -m tests.faults.campaign`` runs a long one."""

from __future__ import annotations

import pytest

from tests.faults.campaign.__main__ import run
from tests.faults.campaign.cases import draw


@pytest.mark.parametrize("trial", range(6))
def test_a_random_fault_ends_as_promised_on_every_rank(trial: int) -> None:
    case = draw(23, trial, [2, 3])
    assert run(case, "smddp", 3.0) == [], case

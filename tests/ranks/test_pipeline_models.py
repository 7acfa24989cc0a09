"""Every model that must work, split over two and four stages: it trains like plain PyTorch.

Each case runs in a few ways, which differ from case to case; ``python -m tests.support.matrix`` runs all of
them with all placements, numbers of microbatches, schedules and replicas.
"""

from __future__ import annotations

import pytest

from tests.ranks.models.case import Case
from tests.support.equality import Pools, cases, compare
from tests.support.matrix import FAMILIES, some_setups

CASES = [(family, case, number) for family in FAMILIES for number, case in enumerate(cases(family))]


@pytest.mark.parametrize(("family", "case", "number"), CASES, ids=[f"{f}: {c.name}" for f, c, _ in CASES])
def test_a_split_model_trains_like_plain_pytorch(pool: Pools, family: str, case: Case, number: int) -> None:
    for setup in some_setups(case, number):
        wrong = compare(pool, family, case, setup)
        assert not wrong, "\n".join(wrong)

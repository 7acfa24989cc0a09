"""Every model that must work, split over two and four stages: it trains like plain PyTorch.

Each case runs in a few ways, which differ from case to case; ``python -m tests.support.matrix`` runs all of
them with all placements, numbers of microbatches, schedules and replicas.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.models.case import Case
from tests.support.equality import Pools, cases, compare
from tests.support.matrix import FAMILIES, some_setups

# a plain model, and what torch itself has changed between the versions that are supported
NEWEST = {
    "wiring: sequential",
    "checkpointing: functions across stages, reentrant",
    "checkpointing: functions across stages, non-reentrant",
    "functions: custom functions in the glue",
    "functions: custom functions in modules",
}


def as_parameter(family: str, case: Case, number: int) -> Any:
    """A case for pytest, with its name and marker."""
    name = f"{family}: {case.name}"
    return pytest.param(family, case, number, id=name, marks=[pytest.mark.newest] if name in NEWEST else [])


CASES = [
    as_parameter(family, case, number) for family in FAMILIES for number, case in enumerate(cases(family))
]


@pytest.mark.parametrize(("family", "case", "number"), CASES)
def test_a_split_model_trains_like_plain_pytorch(pool: Pools, family: str, case: Case, number: int) -> None:
    for setup in some_setups(case, number):
        wrong = compare(pool, family, case, setup)
        assert not wrong, "\n".join(wrong)


def test_the_cases_that_run_on_the_newest_torch_are_there() -> None:
    assert {case.id for case in CASES} >= NEWEST

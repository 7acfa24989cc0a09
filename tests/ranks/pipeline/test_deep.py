"""Eight stages, each in a process of its own, train like plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.models.case import Case
from tests.ranks.pipeline.test_schedules import ways
from tests.support.equality import Pools, Setup, cases, compare, find
from tests.support.ranks import RankPool

STAGES = MICROBATCHES = 8


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Pools]:
    """Processes for this file alone: eight of them are too many to keep for the session."""
    ranks = RankPool(STAGES)
    yield lambda world_size: ranks
    ranks.close(kill=True)


@pytest.mark.parametrize("case", cases("deep"), ids=lambda case: case.name)
@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
@pytest.mark.parametrize("placement", ["chain", "looped"])
def test_a_model_on_eight_stages_trains_like_plain_pytorch(
    eight_ranks: Pools, case: Case, schedule: str, placement: str
) -> None:
    wrong = compare(eight_ranks, "deep", case, Setup(STAGES, MICROBATCHES, placement, schedule))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "schedule", ["1f1b", "zero_bubble", "zero_bubble H2", "v", "looped", "searched", "searched v"]
)
def test_every_schedule_of_eight_stages_trains_like_plain_pytorch(eight_ranks: Pools, schedule: str) -> None:
    [setup] = ways(schedule, STAGES, MICROBATCHES, ["automatic"])
    wrong = compare(eight_ranks, "deep", find("deep", "perceptron"), setup)
    assert not wrong, "\n".join(wrong)

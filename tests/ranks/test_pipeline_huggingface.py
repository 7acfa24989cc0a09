"""Hugging Face models, unmodified and with the loss inside, split over two and four stages."""

from __future__ import annotations

import pytest

from tests.ranks.models.case import Case
from tests.support.equality import Pools, cases, compare
from tests.support.matrix import some_setups

CASES = list(enumerate(cases("huggingface")))


@pytest.mark.parametrize(("number", "case"), CASES, ids=[case.name for _, case in CASES])
def test_a_split_language_or_vision_model_trains_like_plain_pytorch(
    pool: Pools, number: int, case: Case
) -> None:
    for setup in some_setups(case, number):
        wrong = compare(pool, "huggingface", case, setup)
        assert not wrong, "\n".join(wrong)

"""Hugging Face models, unmodified and with the loss inside, split over two and four stages."""

from __future__ import annotations

import pytest
import torch

import smdistributed.modelparallel.torch as smp
from tests.ranks.models.case import Case
from tests.support.equality import Pools, cases, compare, find
from tests.support.matrix import some_setups

CASES = list(enumerate(cases("huggingface")))


@pytest.mark.parametrize(("number", "case"), CASES, ids=[case.name for _, case in CASES])
def test_a_split_language_or_vision_model_trains_like_plain_pytorch(
    pool: Pools, number: int, case: Case
) -> None:
    for setup in some_setups(case, number):
        wrong = compare(pool, "huggingface", case, setup)
        assert not wrong, "\n".join(wrong)


def check_hidden_states(name: str) -> None:
    case = find("huggingface", name)
    ids, _ = case.batch(0, 4)
    plain = case.build().eval()
    with torch.no_grad():
        expected = plain(input_ids=ids, output_hidden_states=True)
    smp.init({"partitions": 2, "microbatches": 2})
    try:
        model = smp.DistributedModel(case.build().eval())
        forward = smp.step(lambda ids: model(input_ids=ids, output_hidden_states=True))
        for _ in range(2):
            with torch.no_grad():
                found = forward(ids)
            assert type(found) is type(expected)
            for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
                torch.testing.assert_close(one.concat(), other)
    finally:
        smp.shutdown()


@pytest.mark.parametrize("name", ["GPT-2, eager", "BERT, eager"])
def test_hidden_states_of_every_stage_are_returned(pool: Pools, name: str) -> None:
    """transformers installs the hooks that record them in the first forward, which is the dry run's."""
    pool(2).run(check_hidden_states, name)

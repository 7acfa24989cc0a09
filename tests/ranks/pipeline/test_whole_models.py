"""The models of the pipeline's tests themselves: on one partition they train like plain PyTorch.

This shows that cases, reference and comparison are right; what is different on several partitions is then the
pipeline's doing.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

from tests.ranks.models.case import Case
from tests.support.equality import Pools, Setup, cases, compare, differences, find, reference
from tests.support.matrix import FAMILIES

CASES = [(family, case) for family in (*FAMILIES, "huggingface") for case in cases(family)]
EACH = pytest.mark.parametrize(("family", "case"), CASES, ids=[f"{f}: {c.name}" for f, c in CASES])


@EACH
def test_on_one_partition_a_model_trains_like_plain_pytorch(pool: Pools, family: str, case: Case) -> None:
    setups = [Setup(microbatches=count) for count in (1, 2, 4)]
    wrong = [line for setup in setups for line in compare(pool, family, case, setup)]
    assert not wrong, "\n".join(wrong)


@EACH
def test_microbatches_together_are_the_whole_batch(family: str, case: Case) -> None:
    parts = reference(family, case.name, 4, steps=2)
    assert any(gradient is not None and gradient.any() for gradient in parts.gradients[-1].values())
    if case.whole:
        whole = reference(family, case.name, 1, steps=2)
        wrong = list(differences(parts, whole, tolerance=10 * case.tolerance))
        assert not wrong, "\n".join(wrong)


@EACH
def test_a_model_has_the_parts_to_be_placed(family: str, case: Case) -> None:
    model = case.build()
    for stages in (2, 4):
        placements = case.placements(stages)
        assert placements or stages == 4
        for placement in placements.values():
            for part, stage in (placement or {}).items():
                model.get_submodule(part)
                assert 0 <= stage < stages


def test_the_comparison_sees_what_is_wrong() -> None:
    case = find("wiring", "unused layer and dropped result")
    wanted = reference("wiring", case.name, 2, steps=2)
    longer = reference("wiring", case.name, 2, steps=3)
    assert not list(differences(wanted, wanted, tolerance=0))
    later = replace(longer, losses=longer.losses[1:], gradients=[wanted.gradients[0], longer.gradients[2]])
    lines = list(differences(later, wanted, tolerance=1e-6))
    assert any(line.startswith("loss of step 0:") for line in lines)
    assert any(line.startswith("step 1: gradient head.weight[") for line in lines)
    assert not any(line.startswith("step 0:") for line in lines)
    assert any(line.startswith("parameter first.bias[") for line in lines)
    assert wanted.gradients[1]["second.weight"] is None


@pytest.mark.parametrize(("family", "name"), [("attention", "encoder"), ("buffers", "residual network")])
def test_the_comparison_allows_over_many_steps_what_rounding_does_and_no_more(family: str, name: str) -> None:
    wanted, rounded = (reference(family, name, 2, steps=20, rounded=flag) for flag in (False, True))
    assert not list(differences(rounded, wanted, tolerance=1e-6, rounded=rounded))
    wrong = deepcopy(wanted)
    for gradient in wrong.gradients[12].values():
        assert gradient is not None
        gradient.mul_(1 + 1e-4)
    lines = list(differences(wrong, wanted, tolerance=1e-6, rounded=rounded))
    assert lines and all(line.startswith("step 12: gradient") for line in lines)

"""Recipes on CUDA, where models come with the first step: trained, saved, gone on with at other degrees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts.smp import recipe
from tests.scripts.test_recipes import PUBLISHED, PUBLISHED_ALL, RECIPES, ROUNDING, Flags, words
from tests.support.cuda import MAPPED, CudaRanks

Gpus = Callable[[int], CudaRanks]

CASES: dict[str, tuple[Flags, Flags]] = {
    **{name: RECIPES[name] for name in ("gpt2", "gptj plain", "gpt_neox", "t5")},
    **{
        f"{name} published": tuple({**PUBLISHED_ALL, **flags} for flags in PUBLISHED[name])  # type: ignore[misc]
        for name in ("gptj", "falcon", "gpt2 fp16")
    },
}


def trained(line: list[str]) -> tuple[list[float], float]:
    losses, _, evaluation = recipe.main(line)
    assert MAPPED or torch.cuda.memory_allocated()
    return losses, evaluation


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_goes_on_as_it_would_have(gpus: Gpus, tmp_path: Path, name: str) -> None:
    own, other = CASES[name]

    def run(flags: Flags, **more: Any) -> tuple[list[float], float]:
        found = gpus(4).run(trained, words(name, flags, tmp_path, **more), backend=None)
        assert all(one == found[0] for one in found)
        return found[0]  # type: ignore[no-any-return]

    losses, evaluation = run(own, checkpoint_freq=3)
    assert losses[-1] < losses[0]
    wanted = [*losses[3:], evaluation]
    for flags, margin in (
        (own, 1e-3),
        (other, next((ROUNDING[key] for key in ROUNDING if own.get(key)), 1e-3)),
    ):
        again, evaluated = run(flags, load_partial=1, load_tag="trained_gpt_nparams-3")
        assert [*again, evaluated] == pytest.approx(wanted, rel=margin)

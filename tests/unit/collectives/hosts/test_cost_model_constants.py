"""The model of costs cuts what travels between hosts as the native core does."""

from __future__ import annotations

import re

import pytest

from opensmd.collectives.hosts import cost_model
from opensmd.native.recipe import SOURCES


def constant(file: str, name: str) -> int:
    """What a C++ source says: a whole number, which may be shifted."""
    text = (SOURCES / file).read_text()
    found: list[tuple[str, str]] = re.findall(rf"constexpr \w+ {name} = (\d+)u?(?: << (\d+))?;", text)
    ((number, shift),) = found
    return int(number) << int(shift or 0)


@pytest.mark.parametrize(
    ("python", "file", "cxx"),
    [
        ("MOST_OF_SUM", "torch/hosts/levels/parts.hpp", "kMostOfSum"),
        ("LEAST_OF_SUM", "torch/hosts/levels/parts.hpp", "kLeastOfSum"),
        ("MOST_OF_BLOCK", "torch/hosts/levels/parts.hpp", "kMostOfBlock"),
        ("MOST_OF_PART", "torch/hosts/levels/parts.hpp", "kMostOfPart"),
        ("LEAST_OF_PART", "torch/hosts/levels/parts.hpp", "kLeastOfPart"),
        ("LEAST_IN_CHAIN", "torch/hosts/levels/parts.hpp", "kLeastInChain"),
        ("LEAST_IN_RING", "torch/hosts/levels/parts.hpp", "kLeastInRing"),
        ("LEAST_OF_RING", "torch/hosts/levels/parts.hpp", "kLeastOfRing"),
        ("LEAST_OF_TURN", "torch/hosts/levels/parts.hpp", "kLeastOfTurn"),
        ("MOST_OF_TURN", "torch/hosts/levels/parts.hpp", "kMostOfTurn"),
        ("MOST_CARRIED_TO_SEVERAL", "torch/hosts/agreement.hpp", "kMostToAll"),
        ("FEWEST_PARTS", "torch/hosts/levels/parts.hpp", "kFewestParts"),
        ("FEWEST_IN_CHAIN", "torch/hosts/levels/parts.hpp", "kFewestInChain"),
        ("FEWEST_IN_RING", "torch/hosts/levels/parts.hpp", "kFewestInRing"),
        ("FEWEST_IN_SHORT_CHAIN", "torch/hosts/levels/parts.hpp", "kFewestInShortChain"),
        ("LEAST_OF_CUT", "core/memory/arena.hpp", "kLine"),
    ],
)
def test_the_model_and_the_core_cut_alike(python: str, file: str, cxx: str) -> None:
    assert getattr(cost_model, python) == constant(file, cxx)


def test_int8_codes_have_a_scale_for_as_many_numbers_as_in_the_core() -> None:
    block = constant("core/kernels/compression.hpp", "kCompressionBlock")
    assert cost_model.SHARES["int8"] == (1 + 4 / block) / 4

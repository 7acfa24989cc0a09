"""Every draw of Python's and NumPy's generators shows, and nothing else does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from opensmd.modelparallel.runtime.side_effects.random_numbers.positions import generator_positions

DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "randint": lambda: random.randint(1, 6),
    "seed": lambda: random.seed(1),
    "as many as there are words": lambda: [random.getrandbits(32) for _ in range(624)],
    "numpy": numpy.random.rand,
    "numpy's normal": numpy.random.normal,
    "numpy's seed": lambda: numpy.random.seed(1),
    "as many as numpy has words": lambda: numpy.random.bytes(4 * 624),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    numpy.random.seed(0)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_moves_a_generator(draw: Callable[[], Any]) -> None:
    before = generator_positions()
    assert generator_positions() == before
    draw()
    assert generator_positions() != before


def test_generators_whose_states_are_put_back_are_where_they_were() -> None:
    before, states = generator_positions(), (random.getstate(), numpy.random.get_state())
    random.random()
    numpy.random.rand()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    assert generator_positions() == before


def test_positions_are_read_from_memory_and_those_of_other_generators_from_their_state() -> None:
    (python, _), found = generator_positions()
    assert python == random.getstate()[1][-1]
    assert found is not None and found[0] == numpy.random.get_state()[2]
    usual = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(0))
    try:
        before = generator_positions()
        assert generator_positions() == before
        numpy.random.rand()
        assert generator_positions() != before
    finally:
        numpy.random.set_bit_generator(usual)

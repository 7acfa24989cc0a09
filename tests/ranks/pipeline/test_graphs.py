"""Random graphs of modules and operations, placed at random, train like plain PyTorch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tests.ranks.models.graphs import OPERATIONS, make
from tests.support.equality import Pools, Setup, compare, reference

MODULES = 3
STEPS = 1


@st.composite
def graphs(draw: st.DrawFn) -> tuple[str, Setup]:
    """The text of a graph and a way to run it."""
    stages = draw(st.sampled_from([2, 3]))
    nodes: list[tuple[Any, ...]] = []
    for number in range(draw(st.integers(2, 9))):
        value, module = st.integers(0, number), st.integers(0, MODULES - 1)
        kind = draw(st.sampled_from(["module", "module", "two", "checkpoint", "no_grad", *OPERATIONS]))
        if kind == "two":
            nodes.append((kind, draw(value), draw(value), draw(module)))
        elif kind == "checkpoint":
            nodes.append((kind, draw(value), draw(module), draw(st.integers(0, 1))))
        elif kind in ("module", "no_grad"):
            nodes.append((kind, draw(value), draw(module)))
        else:
            nodes.append((kind, draw(value), draw(value)))
    stage = st.integers(0, stages - 1)
    places = [draw(stage) for _ in range(2 * MODULES)]
    text = json.dumps({"stages": stages, "places": places, "head": draw(stage), "nodes": nodes})
    microbatches = draw(st.sampled_from([1, 2, 4]))
    schedule = draw(st.sampled_from(["simple", "interleaved"]))
    return text, Setup(stages, microbatches, "drawn", schedule, steps=STEPS)


def _trains(text: str, setup: Setup) -> bool:
    """Whether plain PyTorch trains it (autograd refuses some changes in place)."""
    try:
        reference("graphs", text, setup.microbatches, steps=STEPS)
    except RuntimeError:
        return False
    return True


# shrinking would start new processes after every failure; the message has all that is needed to look at one
@pytest.mark.timeout(300)
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(drawn=graphs())
def test_random_graphs_with_random_placements_train_like_plain_pytorch(
    pool: Pools, drawn: tuple[str, Setup]
) -> None:
    text, setup = drawn
    assume(_trains(text, setup))
    wrong = compare(pool, "graphs", make(text), setup)
    assert not wrong, "\n".join(wrong)

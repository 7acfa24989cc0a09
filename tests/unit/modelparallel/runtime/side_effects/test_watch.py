"""What a watched call has written, and what it depends on."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.runtime.calls.call import Call
from opensmd.modelparallel.runtime.calls.descriptions.describing import ResultParts
from opensmd.modelparallel.runtime.side_effects.watch import Watch


def watched(function: Any, *args: Tensor, owner: nn.Module | None = None) -> tuple[Watch, Any]:
    call = Call("it", "key", function, args, {}, list(args), [None] * len(args), owner=owner)
    with Watch(call, (args, {}), args, first=True) as watch:
        result = function(*args)
    return watch, watch.description(ResultParts.of(result, "it"))


def test_a_watched_call_tells_what_it_has_written_and_whether_its_result_depends_on_data() -> None:
    _, plain = watched(torch.neg, torch.ones(2))
    assert plain.is_plain and not plain.depends_on_data
    _, counting = watched(torch.nonzero, torch.ones(2))
    assert counting.depends_on_data
    _, writing = watched(lambda x, y: torch.add(x, 1, out=y), torch.ones(2), torch.ones(2))
    assert [tuple(change) for change in writing.changed] == [(1, False, True, None)]
    _, reshaping = watched(lambda x: x.unsqueeze_(0), torch.ones(2))
    assert [tuple(change) for change in reshaping.changed] == [(0, False, False, ((1, 2), (2, 1)))]


class Counting(nn.Module):
    """Counts its calls, until it has reached three."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 2

    def forward(self, x: Tensor) -> Tensor:
        self.calls = min(self.calls + 1, 3)
        return x + self.calls


def test_a_watched_call_tells_whether_it_has_left_anything_for_the_next_one() -> None:
    norm, x = nn.BatchNorm1d(2), torch.randn(4, 2)
    assert watched(norm, x, owner=norm)[0].goes_on()
    assert not watched(norm.eval(), x, owner=norm)[0].goes_on()
    counting = Counting()
    assert watched(counting, x, owner=counting)[0].goes_on()
    assert not watched(counting, x, owner=counting)[0].goes_on()


class Drawing(nn.Module):
    """Adds noise from a generator of its own."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        of_torch = isinstance(self.of, torch.Generator)
        return x + (torch.rand(1, generator=self.of) if of_torch else float(self.of.random()))


@pytest.mark.parametrize(
    "made", [torch.Generator, random.Random, numpy.random.RandomState, numpy.random.default_rng]
)
def test_who_draws_from_a_generator_of_its_own_keeps_the_order(made: Any) -> None:
    module = nn.Sequential(nn.Identity(), Drawing(made()))
    watch, _ = watched(module, torch.ones(1), owner=module)
    assert watch.goes_on()
    watch, _ = watched(module[0], torch.ones(1), owner=module[0])
    assert not watch.goes_on()

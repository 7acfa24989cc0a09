"""The dynamic programme against all splits that there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opensmd.modelparallel.planning.balance import CLEARLY, CUT_WEIGHT, TOLERANCE, Sequence1D, split_evenly


@st.composite
def problems(draw: st.DrawFn, *, fixed: bool = False) -> Sequence1D:
    count, stages = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    shares = st.integers(0, 100).map(lambda number: number / 1024)  # whose sums are exact

    def some(length: int) -> list[float]:
        return draw(st.lists(shares, min_size=length, max_size=length))

    places = st.integers(-1, stages - 1) if fixed else st.just(-1)
    return Sequence1D(
        even=some(count),
        staged=some(count),
        weights=some(stages),
        cuts=[some(count) for _ in range(stages - 1)],
        fixed=draw(st.lists(places, min_size=count, max_size=count)),
        preload=some(stages),
        alone=draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any)),
    )


def all_bounds(items: Sequence1D) -> list[tuple[int, ...]]:
    """Of every contiguous split that keeps the places; without empty stages if there are such.

    If none is clearly better, only of those whose stages begin with what may be alone.
    """
    count, stages = len(items.even), len(items.weights)
    inner = itertools.combinations_with_replacement(range(count + 1), stages - 1)
    every = [(0, *bounds, count) for bounds in inner]
    kept = [bounds for bounds in every if keeps_places(items, bounds) and is_filled(items, bounds)]
    free = without_empty(kept)
    strict = without_empty([bounds for bounds in kept if begins_well(items, bounds)])
    if not strict or best_of(items, free) * (1 + CLEARLY) < best_of(items, strict):
        return free
    return strict


def without_empty(every: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    full = [bounds for bounds in every if all(one < next for one, next in itertools.pairwise(bounds))]
    return full or every


def best_of(items: Sequence1D, every: list[tuple[int, ...]]) -> float:
    return min(max(loads(items, bounds)) for bounds in every)


def begins_well(items: Sequence1D, bounds: tuple[int, ...]) -> bool:
    return all(
        items.alone[start] or items.fixed[start] >= 0
        for start, end in itertools.pairwise(bounds)
        if 0 < start < end
    )


def keeps_places(items: Sequence1D, bounds: tuple[int, ...]) -> bool:
    return all(
        items.fixed[item] in (-1, stage)
        for stage, (start, end) in enumerate(itertools.pairwise(bounds))
        for item in range(start, end)
    )


def is_filled(items: Sequence1D, bounds: tuple[int, ...]) -> bool:
    alone = [may or place >= 0 for may, place in zip(items.alone, items.fixed, strict=True)]
    return all(start == end or any(alone[start:end]) for start, end in itertools.pairwise(bounds))


def cut_cost(items: Sequence1D, stage: int, place: int) -> float:
    """Of one between this stage and the next."""
    return items.cuts[stage][place] if 0 < place < len(items.even) else 0.0


def loads(items: Sequence1D, bounds: tuple[int, ...]) -> list[float]:
    """What each stage carries, counted item by item."""
    found = []
    for stage, (start, end) in enumerate(itertools.pairwise(bounds)):
        load = sum(items.even[start:end]) + items.weights[stage] * sum(items.staged[start:end])
        if start < end:
            load += cut_cost(items, stage - 1, start) + cut_cost(items, stage, end)
        found.append(load + items.preload[stage])
    return found


@given(problems())
def test_no_split_has_a_smaller_worst_stage_than_the_tolerance_allows(items: Sequence1D) -> None:
    split = split_evenly(items, tolerance=0.02)
    assert split.bounds in set(all_bounds(items))
    assert split.worst == pytest.approx(max(loads(items, split.bounds)))
    best = best_of(items, all_bounds(items))
    assert split.worst <= best * 1.02 + 1e-12


@given(problems(), st.sampled_from([0.02, 0.5, 2.0]))
def test_of_the_good_splits_the_cheapest_and_most_even_one_is_taken(
    items: Sequence1D, tolerance: float
) -> None:
    def price(bounds: tuple[int, ...]) -> float:
        cut = sum(cut_cost(items, stage, place) for stage, place in enumerate(bounds[1:-1]))
        return len(items.weights) * sum(load * load for load in loads(items, bounds)) + CUT_WEIGHT * cut

    best = best_of(items, all_bounds(items))
    split = split_evenly(items, tolerance=tolerance)
    good = [bounds for bounds in all_bounds(items) if max(loads(items, bounds)) <= best * (1 + tolerance)]
    assert price(split.bounds) <= min(map(price, good)) + 1e-6


@given(problems(fixed=True))
def test_fixed_places_are_kept_or_refused_where_they_cannot_be(items: Sequence1D) -> None:
    places = [place for place in items.fixed if place >= 0]
    if places != sorted(places):
        with pytest.raises(ValueError, match="no contiguous split has them all"):
            split_evenly(items)
        return
    split = split_evenly(items)
    assert keeps_places(items, split.bounds)
    best = best_of(items, all_bounds(items))
    assert split.worst <= best * (1 + TOLERANCE) + 1e-12

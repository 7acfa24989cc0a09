"""The rank grid against the documentation's tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opensmd.modelparallel.ranks.grid import CommGroup, RankGrid, RankType


@pytest.mark.parametrize(
    ("placement", "replicas", "stages"),
    [
        ("cluster", [(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("spread", [(0, 4), (1, 5), (2, 6), (3, 7)], [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ],
)
def test_eight_ranks_in_two_partitions_are_placed_as_documented(
    placement: str, replicas: list[tuple[int, ...]], stages: list[tuple[int, ...]]
) -> None:
    grid = RankGrid(8, 2, placement=placement)
    assert grid.partition(CommGroup.MP_GROUP) == replicas == grid.partition(CommGroup.PP_GROUP)
    assert grid.partition(CommGroup.DP_GROUP) == stages == grid.partition(CommGroup.RDP_GROUP)


@pytest.mark.parametrize(
    ("placement", "tensor", "pipeline", "data"),
    [
        (
            "DPT",
            [(0, 1), (2, 3), (4, 5), (6, 7)],
            [(0, 2), (1, 3), (4, 6), (5, 7)],
            [(0, 4), (1, 5), (2, 6), (3, 7)],
        ),
        (
            "PTD",
            [(0, 2), (1, 3), (4, 6), (5, 7)],
            [(0, 4), (1, 5), (2, 6), (3, 7)],
            [(0, 1), (2, 3), (4, 5), (6, 7)],
        ),
        (
            "DTP",
            [(0, 2), (1, 3), (4, 6), (5, 7)],
            [(0, 1), (2, 3), (4, 5), (6, 7)],
            [(0, 4), (1, 5), (2, 6), (3, 7)],
        ),
    ],
)
def test_the_last_letter_of_a_placement_varies_fastest(
    placement: str,
    tensor: list[tuple[int, ...]],
    pipeline: list[tuple[int, ...]],
    data: list[tuple[int, ...]],
) -> None:
    grid = RankGrid(8, pipeline=2, tensor=2, placement=placement)
    assert grid.partition(CommGroup.TP_GROUP) == tensor
    assert grid.partition(CommGroup.PP_GROUP) == pipeline
    assert grid.partition(CommGroup.RDP_GROUP) == data


@given(
    st.tuples(*[st.integers(1, 3)] * 3),
    st.sampled_from(["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"]),
)
def test_every_rank_is_in_one_group_of_each_kind_and_sizes_multiply(
    degrees: tuple[int, int, int], placement: str
) -> None:
    data, pipeline, tensor = degrees
    grid = RankGrid(data * pipeline * tensor, pipeline, tensor, placement)
    for kind, size in [
        (CommGroup.WORLD, grid.size),
        (CommGroup.MP_GROUP, pipeline * tensor),
        (CommGroup.DP_GROUP, data * tensor),
        (CommGroup.PP_GROUP, pipeline),
        (CommGroup.TP_GROUP, tensor),
        (CommGroup.RDP_GROUP, data),
    ]:
        groups = grid.partition(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
        assert {len(group) for group in groups} == {size}
    for rank in range(grid.size):
        assert grid.rank_in(CommGroup.PP_GROUP, rank) == grid.coordinates(rank).pipeline
        assert grid.rank_in(CommGroup.RDP_GROUP, rank) == grid.coordinates(rank).data


def test_ranks_that_do_not_fill_replicas_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^1 rank cannot hold whole replicas of 2 ranks each \(1 partition of"
    ):
        RankGrid(1, tensor=2)
    with pytest.raises(ValueError, match="3 ranks cannot hold whole replicas of 2 ranks"):
        RankGrid(3, 2)


def test_a_rank_type_names_its_group() -> None:
    assert RankType.WORLD_RANK.group is CommGroup.WORLD
    assert RankType.PP_RANK.group is CommGroup.PP_GROUP
    assert RankType.RDP_RANK.group is CommGroup.RDP_GROUP

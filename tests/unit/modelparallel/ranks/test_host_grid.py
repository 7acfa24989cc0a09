"""What crosses between hosts, by the placement of ranks."""

from __future__ import annotations

import pytest

from opensmd.modelparallel.ranks.grid import CommGroup, RankGrid
from opensmd.modelparallel.ranks.host_grid import HostGrid

BY_BLOCK, IN_TURN = (0, 0, 1, 1), (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("placement", "hosts", "apart", "averages"),
    [
        ("cluster", BY_BLOCK, frozenset(), 2),
        ("spread", BY_BLOCK, {(0, 1)}, 0),
        ("cluster", IN_TURN, {(0, 1)}, 0),
        ("spread", IN_TURN, frozenset(), 2),
    ],
)
def test_either_activations_or_gradients_of_two_replicas_cross_between_two_hosts(
    placement: str, hosts: tuple[int, ...], apart: frozenset[tuple[int, int]], averages: int
) -> None:
    placed = HostGrid(RankGrid(4, 2, placement=placement), hosts)
    assert placed.stages_apart == apart
    assert placed.spanning(CommGroup.PP_GROUP) == (len(apart) * 2, 2)
    assert placed.spanning(CommGroup.RDP_GROUP) == (averages, 2)
    assert placed.averaging == averages  # of both stages, half of each gradient there and half back
    assert (
        f"placement_strategy {placement!r} on 2 hosts: between hosts go activations and their gradients of "
        f"{len(apart) * 2} of 2 replicas, gradients of weights of {averages} of 2 averages"
    ) == placed.in_words()


def test_replicas_whose_stages_send_over_one_link_at_once_share_it() -> None:
    assert HostGrid(RankGrid(4, 2, placement="spread"), BY_BLOCK).sharing == 2
    assert HostGrid(RankGrid(4, 4), BY_BLOCK).sharing == 1
    # Two replicas that begin on different hosts send over a link each.
    assert HostGrid(RankGrid(4, 2), (0, 1, 1, 0)).sharing == 1


def test_only_stages_on_both_sides_of_a_link_are_apart() -> None:
    assert HostGrid(RankGrid(3, 3), (0, 0, 1)).stages_apart == {(0, 2), (1, 2)}


def test_ranks_of_one_stage_are_named_where_they_share_tensors() -> None:
    words = HostGrid(RankGrid(4, 1, 2), IN_TURN).in_words()
    assert words.endswith(
        "gradients of weights of 0 of 2 averages, tensors of tensor parallelism of 2 of 2 groups"
    )
    assert "activations" not in words

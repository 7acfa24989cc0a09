"""Where a microbatch's graph leaves a rank: which edges a backward begins at, and how often."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.messages.graph_edges import GraphEdges
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.tensors.tags import Tag, put_tag


def tensor(*parents: Tag, home: int = 0, serial: int = 0) -> tuple[Tensor, Tag]:
    """A tensor with a home that was computed from others."""
    made, tag = torch.zeros(2), Tag(home, True, parents=parents, serial=serial)
    put_tag(made, tag)
    return made, tag


def test_a_backward_begins_at_the_edges_that_its_root_depends_on_in_their_order() -> None:
    edges = GraphEdges()
    _, first = tensor()
    _, second = tensor(first)
    loss, _ = tensor(second)
    other, _ = tensor(first)
    for number, tag in ((4, second), (1, first), (2, first)):
        edges.count(tag, number)
    tokens = {number: torch.zeros(0) for number in (1, 4)}
    edges.arrive(4, tokens[4])
    edges.leave(1, tokens[1], [(1, 7)])
    # edge 2 is between two other ranks
    assert edges.behind([loss]) == [1, 4]
    assert edges.behind([other]) == [1]
    assert edges.behind([torch.zeros(2)]) == []
    assert [id(token) for token in edges.tokens([1, 4], keep=True)] == [id(tokens[1]), id(tokens[4])]


def test_what_a_backward_waits_for_first_is_the_latest_edge() -> None:
    edges = GraphEdges()
    edges.leave(3, torch.zeros(0), [(1, 33), (1, 34)])
    edges.arrive(5, torch.zeros(0))
    assert edges.first_gradient([3]) == [(1, 33), (1, 34)]
    assert edges.first_gradient([3, 5]) == []  # its gradient comes from this rank
    assert edges.first_gradient([]) == []


def test_an_edge_is_passed_once_unless_the_graph_is_kept() -> None:
    edges = GraphEdges()
    edges.arrive(1, torch.zeros(0))
    edges.tokens([1], keep=True)
    edges.tokens([1], keep=False)
    with pytest.raises(RuntimeError, match="a second time: specify retain_graph=True"):
        edges.tokens([1], keep=False)


def test_program_points_count_from_one() -> None:
    microbatch = Microbatch(0)
    assert [microbatch.next_point() for _ in range(3)] == [1, 2, 3]


def test_a_microbatch_may_use_tensors_of_earlier_ones_which_is_noted() -> None:
    borrowed: set[Tag] = set()
    microbatch = Microbatch(2, begun=10, borrowed=borrowed)
    own, earlier = Tag(0, serial=12), Tag(0, serial=11)
    for tag in (own, earlier, Tag(0)):
        microbatch.require_not_later(tag)
    assert borrowed == {earlier}
    microbatch.point = "layer 3"
    with pytest.raises(
        SMPError, match="microbatch 2 was given, after layer 3, a tensor that microbatch 3 has"
    ):
        microbatch.require_not_later(Tag(0, serial=13))


def test_a_microbatch_is_not_intercepted_inside_whatever_was_before() -> None:
    microbatch = Microbatch(0)
    with microbatch.not_intercepted():
        assert microbatch.inside
        with microbatch.not_intercepted():
            assert microbatch.inside
        assert microbatch.inside
    assert not microbatch.inside

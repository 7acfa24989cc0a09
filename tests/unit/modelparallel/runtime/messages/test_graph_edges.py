"""Where a microbatch's graph leaves a rank: which edges a backward begins at, and how often."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.runtime.messages.edges import receive_edge
from opensmd.modelparallel.runtime.messages.graph_edges import GraphEdges, Origin
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.tensors.tags import Tag, put_tag

FROM = Origin(source=0, shape=(2,))


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
    edges.arrive(4, tokens[4], FROM)
    edges.leave(1, tokens[1], [(1, 7)])
    # edge 2 is between two other ranks
    assert edges.behind([loss]) == [1, 4]
    assert edges.behind([other]) == [1]
    assert edges.behind([torch.zeros(2)]) == []
    assert [id(token) for token in edges.tokens([1, 4], keep=True)] == [id(tokens[1]), id(tokens[4])]


def test_whether_a_backward_has_been_through_an_edge_is_known_of_those_between_others_too() -> None:
    edges = GraphEdges()
    loss, tag = tensor()
    edges.count(tag, 3)
    assert edges.behind([loss], keep=True) == [] and not edges.has_been_passed(3)
    assert edges.behind([loss], keep=False) == [] and edges.has_been_passed(3)


def test_what_a_backward_waits_for_first_is_the_latest_edge() -> None:
    edges = GraphEdges()
    edges.leave(3, torch.zeros(0), [(1, 33), (1, 34)])
    edges.arrive(5, torch.zeros(0), FROM)
    assert edges.first_gradient([3]) == [(1, 33), (1, 34)]
    assert edges.first_gradient([3, 5]) == []  # its gradient comes from this rank
    assert edges.first_gradient([]) == []


def test_an_edge_is_passed_once_unless_the_graph_is_kept() -> None:
    edges = GraphEdges()
    edges.arrive(1, torch.zeros(0), FROM)
    edges.tokens([1], keep=True)
    edges.tokens([1], keep=False)
    with pytest.raises(RuntimeError, match="a second time: specify retain_graph=True"):
        edges.tokens([1], keep=False)


def test_a_gradient_that_no_backward_of_the_step_sends_back_is_refused() -> None:
    microbatch, sent = Microbatch(3), list[Tensor | None]()
    for number in (1, 2):
        received, token = receive_edge(torch.ones(2, 4), sent.append)
        microbatch.edges.arrive(number, token, Origin(source=5, shape=(2, 4)))
        received.sum().backward()  # as within a module, which may have got it in whichever way
        if number == 1:
            torch.autograd.backward(microbatch.edges.tokens([1], keep=False), [torch.zeros(0)])
            microbatch.require_gradients_sent()
    assert len(sent) == 1
    with pytest.raises(SMPUnsupportedError, match=r"microbatch 3.*shape \(2, 4\) that pipeline rank 5"):
        microbatch.require_gradients_sent()


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

"""Tags: where data is, and what tensors that share memory or a graph have in common."""

from __future__ import annotations

import pickle

import torch

from opensmd.modelparallel.runtime.tensors.tags import (
    AliasFamily,
    Memory,
    Tag,
    ancestors,
    highest_home,
    put_tag,
    real_tensor,
    tag_of,
    tags_of,
    tensor_key,
)


def tagged(home: int, *, requires_grad: bool = False) -> torch.Tensor:
    tensor = torch.zeros(2, 3)
    put_tag(tensor, Tag(home, requires_grad))
    return tensor


def test_a_tensor_without_a_tag_is_replicated_and_operations_follow_the_highest_home() -> None:
    replicated, first, last = torch.zeros(2), tagged(0), tagged(2)
    assert tag_of(replicated) is None
    assert highest_home(tags_of([replicated])) is None
    assert highest_home(tags_of([replicated, last, first])) == 2
    assert highest_home(tags_of([first])) == 0  # the first rank is a home as any other


def test_the_data_may_be_another_tensor_than_the_tagged_one() -> None:
    tensor, real = tagged(1), torch.ones(2, 3)
    assert real_tensor(tensor) is tensor
    tag = tag_of(tensor)
    assert tag is not None
    tag.real = real
    assert real_tensor(tensor) is real


def test_views_share_changes_and_the_graph_and_detached_tensors_the_memory_alone() -> None:
    memory = Memory()
    family = AliasFamily(memory)
    tensor, view = Tag(0, family=family), Tag(0, family=family)
    detached = Tag(0, family=AliasFamily(memory))
    memory.changes += 1
    assert (tensor.changes, view.changes, detached.changes) == (1, 1, 1)
    family.requires_grad = True  # something that requires gradients was written into one of them
    assert tensor.requires_grad and view.requires_grad and not detached.requires_grad
    memory.invalidated = "freed"
    assert detached.invalidated == "freed"


def test_a_tag_without_a_family_has_no_changes_and_makes_one_when_it_is_asked_for() -> None:
    tag = Tag(0)
    assert (tag.changes, tag.invalidated, tag.requires_grad) == (0, None, False)
    assert tag.family is tag.family


def test_ancestors_are_all_that_a_tensor_was_computed_from_also_through_its_views() -> None:
    first, second, written, unrelated = Tag(0), Tag(1), Tag(0), Tag(2)
    middle = Tag(1, parents=(first, second))
    last = Tag(2, parents=(middle, middle))
    last.family.parents = (written,)  # by a change in place, of whichever view
    assert ancestors([last]) == {last, middle, first, second, written}
    assert unrelated not in ancestors([last, first])


def test_keys_say_of_placed_tensors_what_their_tags_say_and_not_what_is_at_hand() -> None:
    one, other = tagged(1, requires_grad=True), torch.zeros(2, 3)
    put_tag(other, Tag(1, True))
    assert tensor_key(one) == tensor_key(other)
    assert not one.requires_grad  # the tag knows better, on every rank
    assert tensor_key(one) != tensor_key(tagged(2, requires_grad=True))
    assert tensor_key(one) != tensor_key(torch.zeros(2, 3))


def test_a_tag_that_is_copied_keeps_its_home_and_leaves_its_graph() -> None:
    tag = Tag(3, True, parents=(Tag(0),), serial=7)
    copied = pickle.loads(pickle.dumps(tag))
    assert (copied.home, copied.requires_grad, copied.parents, copied.serial) == (3, True, (), -1)

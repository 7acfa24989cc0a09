"""What one call changes in modules is changed on other ranks, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.calls.descriptions.description import LeftDescription
from opensmd.modelparallel.runtime.side_effects.effects import Effects, apply
from opensmd.modelparallel.runtime.tensors.tags import Tag, put_tag
from tests.unit.modelparallel.keeping import Keeping


def announced(module: Keeping, other: Keeping, change: Any) -> list[Tensor]:
    """Do ``change`` to ``module``, and what the other ranks hear of it to ``other``; the new tensors."""
    effects = Effects(((), {}), [], ((), {}), [], module)
    change(module)
    found = effects.found([])
    if found is None:
        return []
    left = LeftDescription(found.pickled, found.contents, tuple(found.tensors))  # type: ignore[arg-type]
    apply(left, ((), {}), [], other, [], lambda tensor, _: tensor)  # type: ignore[arg-type, return-value]
    return list(found.tensors)


def test_attributes_and_contents_that_a_call_has_changed_are_changed_elsewhere() -> None:
    module, other = Keeping(), Keeping()
    one, two = torch.ones(()), torch.zeros(())
    assert announced(module, other, lambda each: each.losses.append(one)) == [one]
    kept = other.losses
    assert announced(module, other, lambda each: each.losses.insert(0, two)) == [two]
    assert other.losses is kept and [entry is one for entry in kept] == [False, True]
    announced(module, other, lambda each: each.losses.clear())
    announced(module, other, lambda each: setattr(each, "count", 4))
    announced(module, other, lambda each: setattr(each, "loss", one))
    assert kept == [] and other.count == 4 and other.loss is one
    assert announced(module, other, lambda each: None) == []


def test_a_container_with_another_content_elsewhere_is_only_added_to() -> None:
    module, other = Keeping(), Keeping()
    module.losses, other.losses = [object(), object()], []
    announced(module, other, lambda each: each.losses.append(1))
    assert other.losses == [1]
    module.losses, other.losses = [object(), object()], []
    with pytest.raises(SMPError, match="content differs on this rank"):
        announced(module, other, lambda each: each.losses.reverse())


class Cache:
    """What decoders are given: an object with tensors in it."""

    def __init__(self, length: Tensor) -> None:
        self.length = length


@pytest.mark.parametrize(
    "length", [torch.tensor(3), torch.full((2, 2), 3, dtype=torch.bfloat16), torch.ones(0)]
)
def test_a_tensor_on_all_ranks_that_a_call_changes_inside_an_object_is_changed_elsewhere(
    length: Tensor,
) -> None:
    here, there = Cache(length.clone()), Cache(length.clone())
    kept = there.length
    effects = Effects(((here,), {}), [], ((here,), {}), [], None)
    here.length.add_(2)
    found = effects.found([])
    assert found is not None and not found.tensors
    left = LeftDescription(found.pickled, found.contents, ())
    apply(left, ((there,), {}), [], None, [], lambda tensor, _: tensor)  # type: ignore[arg-type, return-value]
    assert there.length is kept and torch.equal(kept, length + 2)
    assert Effects(((here,), {}), [], ((here,), {}), [], None).found([]) is None


def test_a_tensor_of_one_rank_inside_an_object_stays_there() -> None:
    cache = Cache(torch.zeros(2))
    put_tag(cache.length, Tag(0))
    effects = Effects(((cache,), {}), [], ((cache,), {}), [], None)
    cache.length.add_(1)
    assert effects.found([]) is None


class Shared:
    """An object that modules have."""


def test_small_tensors_in_objects_come_with_their_data() -> None:
    here, there = Keeping(), Keeping()
    here.shared, there.shared = Shared(), Shared()
    small, alias, large = torch.ones(2), here.weight.detach(), torch.ones(1 << 20)
    made: list[Any] = []

    def announce(change: Any) -> list[tuple[Any, bool]]:
        effects = Effects(((), {}), [], ((), {}), [], here)
        change(vars(here.shared))
        found = effects.found([])
        if found is None:
            return []
        left = LeftDescription(found.pickled, found.contents, tuple(found.tensors), found.data)  # type: ignore[arg-type]
        made[:] = []
        apply(left, ((), {}), [], there, [], lambda tensor, data: made.append((tensor, data)) or tensor)  # type: ignore[arg-type, func-returns-value, return-value]
        return [(tensor, data is not None) for tensor, data in made]

    assert announce(lambda each: each.update(small=small)) == [(small, True)]
    assert announce(lambda each: each.update(alias=alias)) == [(alias, False)]
    assert announce(lambda each: each.update(large=large)) == [(large, False)]
    assert announce(lambda each: each.update(held=[here.mean])) == [(here.mean, False)]
    assert announce(lambda each: None) == []
    assert announce(lambda each: small.add_(1)) == [(small, True)]  # they have one of their own
    assert announce(lambda each: large.add_(1)) == []
    assert there.shared.small is small and there.shared.held[0] is here.mean

"""Contents of containers: found, compared, put back."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from typing import Any

import pytest
from torch import Tensor

from opensmd.modelparallel.runtime.side_effects.containers import (
    Containers,
    added,
    containers_in,
    content_of,
    joined,
    set_content,
)


@pytest.mark.parametrize("container", [[1, 2], {"a": 1}, OrderedDict(b=1, a=2), deque([1]), {1, 2}])
def test_the_content_of_a_container_can_be_put_back(container: Any) -> None:
    kept, before = content_of(container), copy.copy(container)
    container.clear()
    set_content(container, kept)
    assert container == before and type(container) is type(before)


def test_containers_in_containers_are_found_once_and_circles_end() -> None:
    inner: list[Any] = []
    outer: dict[str, Any] = {"a": inner, "b": inner, "c": (1, [2])}
    outer["self"] = outer
    assert list(map(id, containers_in(outer))) == [id(outer), id(inner)]


def test_what_was_added_is_told_from_what_was_changed() -> None:
    one, two = object(), object()
    assert added([one], [one, two]) == [two]
    assert added([one], [two]) is None
    assert added({"a": one}, {"a": one, "b": two}) == {"b": two}
    assert added({"a": one}, {"a": two}) is None
    assert joined([one], [two]) == [one, two] and joined({"a": one}, {"b": two}) == {"a": one, "b": two}


def test_containers_among_arguments_are_filled_alike_elsewhere() -> None:
    here: Any = (([1], {"a": OrderedDict()}), {"more": deque([1])})
    there = copy.deepcopy(here)
    containers = Containers(here)
    here[0][0].append(2)
    here[0][1]["a"]["key"] = "value"
    tensors: list[Tensor] = []
    contents = containers.changed(tensors)
    assert contents and not tensors
    Containers(there).fill(contents, [])
    assert there == here
    assert not Containers(here).changed([])

"""A function that backward runs again finds caches and lists as its first run found them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.runtime.side_effects.repeated import repeatable
from opensmd.modelparallel.runtime.tensors.storages import StorageReference


def writes(x: Tensor, places: Any) -> int:
    """How much was there before."""
    before = len(places.seen) + len(places.by_name.get("losses", []))
    places.seen = [*places.seen, x]
    places.by_name.setdefault("losses", []).append(x.sum())
    return before


def test_a_repetition_finds_what_the_first_call_found_and_leaves_what_is_there() -> None:
    places = SimpleNamespace(seen=[], by_name={})
    first, second = repeatable(writes), repeatable(writes)
    assert (first(torch.ones(2), places), second(torch.ones(3), places)) == (0, 2)
    seen, losses = places.seen, places.by_name["losses"]
    assert (second(torch.ones(3), places), first(torch.ones(2), places)) == (2, 0)
    assert places.seen is seen and len(seen) == 2
    assert places.by_name["losses"] is losses and len(losses) == 2


def test_what_was_replaced_since_is_put_back_for_a_repetition() -> None:
    places = SimpleNamespace(seen=[], by_name={"losses": []})
    call = repeatable(lambda pair: writes(*pair))
    assert call((torch.ones(2), places)) == 0
    places.by_name = {"losses": [1, 2, 3]}
    assert call((torch.ones(2), places)) == 0
    assert places.by_name == {"losses": [1, 2, 3]}


def test_inputs_do_not_outlive_the_call_that_was_given_them() -> None:
    places = SimpleNamespace(seen=(), by_name={"losses": []}, other=torch.ones(4))
    x = torch.ones(3)
    memory = StorageReference(x.untyped_storage())
    call = repeatable(lambda pair: pair[1].by_name["losses"].append(1.0))
    call((x, places))
    del x
    assert memory.expired()

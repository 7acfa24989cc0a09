"""What is written and sent of state dicts with tensors in pieces."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from opensmd.modelparallel.checkpoint.saving.collecting import spread_in, with_entries
from opensmd.modelparallel.ranks.spread import Spread


def spread(number: int) -> Spread:
    return Spread(number=number, piece=torch.ones(2), shape=(4,), sizes=(2, 2))


def test_pieces_are_found_in_the_order_in_which_pickle_meets_them() -> None:
    first, second, third = spread(1), spread(2), spread(3)
    content = {"a": {"b": first, "c": [second, 7]}, "d": torch.ones(1), "e": first, "f": third}
    assert spread_in(content) == [first, second, first, third]
    assert spread_in(None) == []


def test_what_does_not_change_stays_the_same_object() -> None:
    kept: dict[str, Any] = {"x": [1, {"y": 2}], "z": OrderedDict(a=1)}
    made = with_entries({"kept": kept, "new": [1, "two"]}, lambda value: 2 if value == "two" else value)
    assert made == {"kept": kept, "new": [1, 2]}
    assert made["kept"] is kept


def test_versions_of_modules_stay() -> None:
    given: Any = torch.nn.BatchNorm1d(2).state_dict()
    made: Any = with_entries(given, lambda value: 0)
    assert made._metadata == given._metadata
    assert set(made.values()) == {0}

"""Structures on their way to other ranks."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.runtime.tensors import structure


class Refusing:
    """Says in a way of its own that it cannot be pickled, after its tensor could."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        raise RuntimeError("not for you")


def test_what_can_be_carried_comes_back_with_other_tensors() -> None:
    first, second = torch.ones(1), torch.zeros(2)
    found: list[Tensor] = [first]
    data = structure.dump_if_possible({"a": [second, 3], "b": first}, found)
    assert data is not None and found[0] is first and found[1] is second
    assert structure.load(data, ["x", "y"]) == {"a": ["y", 3], "b": "x"}


@pytest.mark.parametrize(
    "value",
    [
        lambda: 1,
        threading.Lock(),
        (one for one in ()),
        ctypes.pointer(ctypes.c_int(3)),
        Refusing(torch.ones(1)),
    ],
    ids=["function", "lock", "generator", "pointer", "refusing"],
)
def test_what_pickle_refuses_is_none_and_leaves_no_tensors(value: Any) -> None:
    found = [torch.ones(1)]
    assert structure.dump_if_possible([torch.zeros(2), value], found) is None
    assert len(found) == 1

"""Buffers are read and changed in the order of the microbatches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.side_effects.buffers import OrderedBuffers
from opensmd.modelparallel.runtime.side_effects.slots import Slot
from tests.unit.modelparallel.keeping import Keeping


class Calls:
    """Of a microbatch, as buffers see it."""

    def __init__(self, index: int) -> None:
        self.microbatch: Any = SimpleNamespace(index=index)
        self.waits = 0

    def settle(self) -> None:
        """No backward is deferred here."""

    def wait_for_earlier(self) -> None:
        self.waits += 1


class Thread:
    """Runs one microbatch after another."""

    def __init__(self) -> None:
        self.run: Calls | None = None


class Attributes:
    """Of a step; remembers what is set anew."""

    def __init__(self) -> None:
        self.set: list[str] = []

    def is_set(self, slot: Slot) -> None:
        self.set.append(slot.name)


def reads(buffers: OrderedBuffers, module: Keeping, *changing: int) -> list[bool]:
    """Three microbatches read a buffer, and some change it; whether each has waited."""
    microbatches = [Calls(index) for index in range(3)]
    thread, attributes = Thread(), Attributes()
    with buffers.ordered(thread, attributes, alone=False):
        for index, calls in enumerate(microbatches):
            thread.run = calls
            mean = module.mean
            if index in changing:
                module.mean = mean + 1
    assert attributes.set == ["mean"] * len(changing)
    return [microbatch.waits > 0 for microbatch in microbatches]


def test_who_reads_a_buffer_waits_unless_steps_only_read_it() -> None:
    module = Keeping()
    buffers = OrderedBuffers({"": module})
    assert reads(buffers, module) == [True] * 3  # nothing is known
    assert reads(buffers, module) == [False] * 3
    module.eval()
    assert reads(buffers, module) == [True] * 3  # in another mode
    module.train()
    reads(buffers, module, 2)
    assert reads(buffers, module, 0, 1, 2) == [True] * 3
    assert module.mean.tolist() == [4.0, 4.0] and type(module._buffers) is dict


def test_to_change_a_buffer_that_a_later_microbatch_has_read_is_refused() -> None:
    module = Keeping()
    buffers, thread = OrderedBuffers({"part": module}), Thread()
    with buffers.ordered(thread, Attributes(), alone=False):
        thread.run = Calls(1)
        assert module.mean.sum() == 0
        thread.run = Calls(0)
        with pytest.raises(SMPError, match=r"microbatch 0 has changed buffer 'part.mean' after microbatch 1"):
            module.mean = torch.ones(2)
        with pytest.raises(SMPError, match=r"'part.mean'"):
            buffers.written(dict.__getitem__(module._buffers, "mean"))

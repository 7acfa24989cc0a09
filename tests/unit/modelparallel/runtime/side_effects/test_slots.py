"""The enumeration of what a module holds."""

from __future__ import annotations

import torch

from opensmd.modelparallel.runtime.side_effects.slots import ABSENT, Slot, slots_of
from tests.unit.modelparallel.keeping import Keeping


def test_slots_are_attributes_and_buffers_and_nothing_of_torchs_own() -> None:
    module = Keeping()
    found = {(slot.name, slot.is_buffer) for slot, _ in slots_of(module)}
    assert found == {
        ("mean", True),
        ("losses", False),
        ("count", False),
        ("in_features", False),
        ("out_features", False),
    }


def test_a_slot_can_be_emptied_and_filled() -> None:
    module = Keeping()
    slot, buffer = Slot(module, "loss"), Slot(module, "mean", is_buffer=True)
    assert slot.value is ABSENT
    slot.put(3)
    buffer.put(torch.ones(2))
    assert module.loss == 3 and module.mean.sum() == 2
    slot.put(ABSENT)
    assert not hasattr(module, "loss")

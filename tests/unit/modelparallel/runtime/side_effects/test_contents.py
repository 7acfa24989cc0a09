"""Lists and dicts in attributes, one content for each microbatch, whatever order their turns come in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.runtime.side_effects.contents import ContainerSlots, ContentsPerMicrobatch
from opensmd.modelparallel.runtime.side_effects.slots import Slot


class Losses(nn.Module):
    """Keeps losses as forwards do."""

    def __init__(self, *kept: Tensor) -> None:
        super().__init__()
        self.losses = list(kept)
        self.names = ["a"]


class Turns:
    """Two microbatches of one step, which take turns as the test says."""

    def __init__(self, slots: ContainerSlots) -> None:
        self._begun: set[int] = set()
        self._through: set[int] = set()
        self.contents = ContentsPerMicrobatch(slots, self._begun, self._through)
        self.changed_early: list[tuple[int, list[Tensor]]] = []

    def begin(self, microbatch: int) -> None:
        self._begun.add(microbatch)
        self.contents.begin(microbatch)

    def suspend(self, microbatch: int, *, look: bool = True, through: bool = True) -> None:
        if through:
            self._through.add(microbatch)
        self.contents.suspend(microbatch, 0, self._note, look=look)

    def _note(self, slot: Slot, microbatch: int, before: list[Tensor]) -> None:
        self.changed_early.append((microbatch, before))


def loss(value: float) -> Tensor:
    return torch.tensor(float(value), requires_grad=True) * 1


def values(losses: list[Tensor]) -> list[float]:
    return [each.item() for each in losses]


def test_each_microbatch_finds_what_it_has_put_there_itself() -> None:
    module = Losses()
    turns = Turns(ContainerSlots([module]))
    kept = module.losses
    turns.begin(0)
    module.losses.append(loss(1))
    turns.suspend(0, through=False)
    turns.begin(1)
    assert module.losses == [], "the first is not through its forward: it may still clear them"
    module.losses.append(loss(2))
    turns.suspend(1, through=False)
    turns.begin(0)
    assert values(module.losses) == [1] and module.losses is kept
    turns.begin(1)
    assert values(module.losses) == [2]


def test_a_microbatch_begins_with_what_the_one_before_has_left_once_that_is_through() -> None:
    module = Losses()
    turns = Turns(ContainerSlots([module]))
    turns.begin(0)
    module.losses.append(torch.tensor(1.0))
    turns.suspend(0)
    turns.begin(1)
    assert values(module.losses) == [1]


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        ([torch.tensor(0.0)], [0, 1, 2]),  # a record that only grows, in the order of microbatches
        ([], [2]),  # losses to be trained by are of one microbatch
    ],
)
def test_after_the_step_there_is_what_plain_pytorch_leaves(kept: list[Tensor], left: list[float]) -> None:
    module = Losses(*kept)
    turns = Turns(ContainerSlots([module]))
    for microbatch, through in ((0, False), (1, True), (0, True)):
        turns.begin(microbatch)
        if len(module.losses) == len(kept):
            module.losses.append(loss(microbatch + 1))
        turns.suspend(microbatch, through=through)
    turns.contents.end(2)
    turns.contents.end_step()
    assert values(module.losses) == left


def test_containers_without_tensors_are_left_to_all_microbatches() -> None:
    module = Losses()
    turns = Turns(ContainerSlots([module]))
    turns.begin(0)
    module.names.append("b")
    turns.suspend(0, through=False)
    turns.begin(1)
    assert module.names == ["a", "b"]


def test_a_change_of_what_was_there_is_reported_with_what_that_was() -> None:
    before = torch.tensor(5.0)
    module = Losses(before)
    turns = Turns(ContainerSlots([module]))
    turns.begin(0)
    module.losses[:] = [loss(1)]
    turns.suspend(0)
    assert turns.changed_early == [(0, [before])]


def test_tables_are_not_copied() -> None:
    module = nn.Module()
    module.vocabulary: Any = dict.fromkeys(range(1025), "word")
    module.few: Any = {"a": "word"}
    found = [container for _, container in ContainerSlots([module]).containers()]
    assert found == [module.few]


def test_what_has_changed_once_is_followed_from_the_beginning_of_the_next_step() -> None:
    module = Losses()
    slots = ContainerSlots([module])
    first = Turns(slots)
    first.begin(0)
    module.losses.append(loss(1))
    first.suspend(0)
    first.contents.end_step()
    assert [slot.name for slot in slots.changed] == ["losses"]
    second = Turns(slots)
    second.begin(0)
    module.losses.clear()
    second.suspend(0, look=False, through=False)
    second.begin(1)
    assert values(module.losses) == [1]

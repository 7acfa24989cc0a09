"""Operations that are noted down and run later: only those that matter, with the random numbers of then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.delayed.tape import (
    Constant,
    RandomState,
    RecordedMemory,
    RecordedOperation,
    Reference,
    values_of,
)
from opensmd.modelparallel.exceptions import SMPError

aten = torch.ops.aten


class Tape:
    """Notes down operations on a tensor of so many elements."""

    def __init__(self, elements: int = 4) -> None:
        self.meta = torch.empty(elements, device="meta")
        self.memory = RecordedMemory(self.meta.untyped_storage(), torch.device("cpu"))
        self.whole = Reference.to(self.meta, self.memory)
        made = RecordedOperation(aten.zeros.default, ([elements],), {}, made=[self.whole])
        made.remember()

    def write(self, function: Any, *args: Any, part: slice | None = None, **more: Any) -> RecordedOperation:
        target = self.whole if part is None else Reference.to(self.meta[part], self.memory)
        operation = RecordedOperation(
            function, (target, *args), {}, written=[self.memory], made=[None], **more
        )
        operation.remember()
        return operation


def values(tape: Tape, **options: Any) -> list[float]:
    storage = values_of([tape.memory], **options)[tape.memory]
    return tape.whole.on(storage).tolist()


def test_memory_holds_what_its_operations_leave_in_it_in_their_order() -> None:
    tape = Tape()
    tape.write(aten.fill_.Scalar, 2.0)
    tape.write(aten.mul_.Scalar, 3.0)
    tape.write(aten.fill_.Scalar, 9.0, part=slice(1, 2))
    assert values(tape) == [6.0, 9.0, 6.0, 6.0]


def test_the_past_can_be_asked_for() -> None:
    tape = Tape()
    tape.write(aten.fill_.Scalar, 2.0)
    later = tape.write(aten.fill_.Scalar, 5.0)
    assert values(tape, before=later.number) == [2.0] * 4 and values(tape) == [5.0] * 4


def test_what_is_overwritten_as_a_whole_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    run = RecordedOperation.run

    def counting(self: RecordedOperation, *args: Any, **options: Any) -> None:
        ran.append(self.number)
        run(self, *args, **options)

    monkeypatch.setattr(RecordedOperation, "run", counting)
    tape = Tape()
    idle = tape.write(aten.fill_.Scalar, 1.0)
    part = tape.write(aten.fill_.Scalar, 1.0, part=slice(0, 2))
    last = tape.write(aten.fill_.Scalar, 2.0)
    assert values(tape) == [2.0] * 4
    assert idle.number not in ran and part.number not in ran and last.number in ran


def test_random_numbers_are_those_of_then_and_the_generator_stays_where_it_is_now() -> None:
    generator = torch.Generator().manual_seed(3)
    wanted = torch.empty(4).normal_(generator=torch.Generator().manual_seed(3)).tolist()
    tape = Tape()
    draw = RandomState(generator, generator.get_state())
    operation = tape.write(aten.normal_.default, 0.0, 1.0, random=draw)
    operation.kwargs["generator"] = generator
    generator.manual_seed(99)
    before = generator.get_state()
    assert values(tape) == wanted and torch.equal(generator.get_state(), before)


def test_what_one_memory_is_made_from_is_read_as_it_was_when_it_was_read() -> None:
    source, copy = Tape(), Tape()
    source.write(aten.fill_.Scalar, 4.0)
    copied = RecordedOperation(
        aten.copy_.default, (copy.whole, source.whole), {}, written=[copy.memory], made=[None]
    )
    copied.remember()
    source.write(aten.fill_.Scalar, 8.0)
    assert values(copy) == [4.0] * 4


def test_a_constant_that_has_changed_is_refused() -> None:
    tensor: Tensor = torch.ones(2)
    constant = Constant(tensor)
    assert constant.tensor is tensor
    tensor.add_(1)
    with pytest.raises(SMPError, match=r"a tensor of shape \(2,\), from which delayed parameters are made"):
        assert constant.tensor is tensor

"""What microbatches find in attributes, and in lists of modules, while they take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.calls.descriptions.known_calls import KnownCalls
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.side_effects.attributes import AttributesPerMicrobatch, Places
from opensmd.modelparallel.runtime.side_effects.slots import ABSENT, Slot
from opensmd.modelparallel.runtime.tensors.tags import Tag, put_tag
from tests.unit.modelparallel.keeping import Keeping


def attributes(
    module: nn.Module, places: Places | None = None, microbatches: Sequence[Microbatch] = ()
) -> AttributesPerMicrobatch:
    context: Any = SimpleNamespace(calls=KnownCalls(new=1), borrowed=set(), replacing=0)
    given = microbatches or [Microbatch(index) for index in range(3)]
    return AttributesPerMicrobatch(places or Places(module), context, given)


def all_begin(state: AttributesPerMicrobatch, count: int) -> None:
    """So many microbatches begin, and let others go on."""
    for microbatch in range(count):
        state.begin(microbatch)
        state.suspend(microbatch, through=False)


def test_microbatches_find_what_they_have_put_into_attributes_themselves() -> None:
    module = Keeping()
    state, first, second = attributes(module), torch.zeros(()), torch.ones(())
    state.begin(0)
    module.loss = first
    state.suspend(0, through=False)
    state.begin(1)
    module.loss = second
    state.suspend(1, through=False)
    state.begin(0)
    assert module.loss is first
    state.end(0)
    state.begin(1)
    assert module.loss is second
    state.end(1)
    state.end_step()
    assert module.loss is second


def test_numbers_are_each_microbatchs_own_and_go_on_from_one_to_the_next() -> None:
    module: Any = Keeping()
    module.calls = 0
    state = attributes(module)
    for microbatch in range(3):
        state.begin(microbatch)
        module.calls += 1
        state.suspend(microbatch, through=False)
    for microbatch in range(3):
        state.begin(microbatch)
        assert module.calls == microbatch + 1
        state.end(microbatch)
    state.end_step()
    assert module.calls == 3


def test_a_flag_that_a_later_microbatch_has_set_first_is_set_for_all() -> None:
    module: Any = Keeping()
    state = attributes(module)
    all_begin(state, 2)
    state.begin(1)
    module.hooked = True
    state.end(1)
    state.begin(0)
    assert module.hooked


CACHE = torch.ones(())
EMPTY: dict[str, tuple[Any, Callable[[Any], object], Callable[[Any], object]]] = {
    "none": (
        None,
        lambda module: setattr(module, "kept", CACHE),
        lambda module: setattr(module, "kept", None),
    ),
    "absent": (ABSENT, lambda module: setattr(module, "kept", CACHE), lambda module: delattr(module, "kept")),
    "flag": (
        False,
        lambda module: setattr(module, "kept", True),
        lambda module: setattr(module, "kept", False),
    ),
    "number": (0, lambda module: setattr(module, "kept", 7), lambda module: setattr(module, "kept", 0)),
    "list": ([], lambda module: setattr(module, "kept", [CACHE]), lambda module: setattr(module, "kept", [])),
    "dict": ({}, lambda module: module.kept.update(n=3), lambda module: module.kept.clear()),
    "object": (
        None,
        lambda module: setattr(module, "kept", object()),
        lambda module: setattr(module, "kept", None),
    ),
}


@pytest.mark.parametrize(("empty", "fill", "clear"), EMPTY.values(), ids=EMPTY)
def test_what_the_first_forward_has_reset_a_later_microbatch_never_finds_set_by_another(
    empty: Any, fill: Callable[[Any], object], clear: Callable[[Any], object]
) -> None:
    module: Any = Keeping()
    slot, places = Slot(module, "kept"), Places(module)
    slot.put(empty)
    state = attributes(module, places)
    assert state.watches_first
    state.begin(0)
    fill(module)
    state.watch_first()
    clear(module)
    state.suspend(0, through=True)
    for step in range(2):
        begun = range(1 - step, 3)
        for microbatch in begun:
            state.begin(microbatch)
            assert slot.value == empty
            fill(module)
            state.suspend(microbatch, through=False)
        for microbatch in begun:
            state.begin(microbatch)
            assert slot.value is not ABSENT and slot.value
            clear(module)
            state.end(microbatch)
        state.end_step()
        state = attributes(module, places)
        assert not state.watches_first


def test_what_the_first_forward_leaves_is_for_all() -> None:
    module: Any = Keeping()
    module.table = None
    state, table = attributes(module), torch.zeros(2)
    state.begin(0)
    module.table = table
    state.watch_first()
    state.suspend(0, through=True)
    state.begin(1)
    assert module.table is table


def test_a_number_that_the_first_forward_resets_and_a_later_one_does_not_passes_on() -> None:
    module: Any = Keeping()
    state = attributes(module)
    for microbatch, left in ((0, 0), (1, 5)):
        state.begin(microbatch)
        module.count += 1
        state.watch_first()
        module.count = left
        state.suspend(microbatch, through=True)
    state.begin(2)
    assert module.count == 5
    state.suspend(2, through=False)
    state.begin(2)
    module.count += 1
    state.suspend(2, through=False)
    state.begin(2)
    assert module.count == 6


def turns(module: Keeping, state: AttributesPerMicrobatch, *, clear: str) -> list[list[float]]:
    """Two microbatches fill a list in two parts, in turns; what each has in the end."""
    totals: dict[int, list[float]] = {}
    for part in range(2):
        for microbatch in range(2):
            state.begin(microbatch)
            if clear == "first" and part == 0:
                module.losses.clear()
            if clear == "anew first" and part == 0:
                module.losses = []
            module.losses.append(torch.tensor(10.0 * microbatch + part, requires_grad=clear != "never"))
            if part == 1:
                totals[microbatch] = [loss.item() for loss in module.losses]
                if clear == "last":
                    module.losses.clear()
                if clear == "anew last":
                    module.losses = []
                state.end(microbatch)
            else:
                state.suspend(microbatch, through=False)
    state.end_step()
    return [totals[0], totals[1]]


@pytest.mark.parametrize("clear", ["first", "last"])
def test_microbatches_have_lists_that_they_clear_to_themselves(clear: str) -> None:
    module = Keeping()
    kept, places = module.losses, Places(module)
    for _ in range(3):
        assert turns(module, attributes(module, places), clear=clear) == [[0.0, 1.0], [10.0, 11.0]]
        assert module.losses is kept
        assert [one.item() for one in kept] == ([] if clear == "last" else [10.0, 11.0])


@pytest.mark.parametrize("other_mode", [False, True])
def test_what_is_reset_at_the_end_is_found_when_a_microbatch_is_first_suspended_before(
    *, other_mode: bool
) -> None:
    module = Keeping()
    module.loss = None
    places = Places(module)
    if other_mode:
        all_begin(attributes(module.eval(), places), 1)
        module.train()

    def fill(value: float) -> None:
        module.losses.append(torch.tensor(value))
        module.loss = module.losses[-1]

    microbatches = [Microbatch(0), Microbatch(1)]
    state = attributes(module, places, microbatches)
    for microbatch in microbatches:
        state.begin(microbatch.index)
        fill(0.0)
        module.losses.clear()
        module.loss = None
        microbatch.next_point()
        state.end(microbatch.index)
    state.end_step()

    state = attributes(module, places, [Microbatch(0), Microbatch(1)])
    for number in range(2):
        state.begin(number)
        assert module.losses == []
        fill(number)
        state.suspend(number, through=False)
    for number in range(2):
        state.begin(number)
        assert module.losses == [module.loss] == [number]
        state.end(number)


def test_a_list_is_found_that_forwards_fill_and_clear_only_in_later_steps() -> None:
    module = Keeping()
    places = Places(module)
    for _ in range(2):
        state = attributes(module, places)
        all_begin(state, 2)
        for microbatch in range(2):
            state.end(microbatch)
        state.end_step()
    assert turns(module, attributes(module, places), clear="last") == [[0.0, 1.0], [10.0, 11.0]]


@pytest.mark.parametrize("clear", ["anew first", "anew last"])
def test_microbatches_have_lists_that_they_set_anew_to_themselves(clear: str) -> None:
    module = Keeping()
    places = Places(module)
    for _ in range(3):
        assert turns(module, attributes(module, places), clear=clear) == [[0.0, 1.0], [10.0, 11.0]]
        assert [one.item() for one in module.losses] == ([] if clear == "anew last" else [10.0, 11.0])


def test_a_list_that_is_made_where_there_was_none_is_empty_for_others_in_whichever_order_they_come() -> None:
    module: Any = Keeping()
    state = attributes(module)
    all_begin(state, 3)
    for microbatch in (2, 0, 1):
        state.begin(microbatch)
        if not hasattr(module, "kept"):
            module.kept = []
        assert module.kept == []
        module.kept.append(torch.zeros((), requires_grad=True))
        state.suspend(microbatch, through=False)


def test_a_list_that_is_made_of_the_one_before_is_what_later_microbatches_begin_with() -> None:
    module = Keeping()
    places = Places(module)
    for step in range(3):
        state = attributes(module, places)
        for microbatch in range(3):
            state.begin(microbatch)
            module.losses = [*module.losses, torch.tensor(3.0 * step + microbatch)][-3:]
            state.suspend(microbatch, through=False)
        for microbatch in range(3):
            state.begin(microbatch)
            state.end(microbatch)
        state.end_step()
        assert [one.item() for one in module.losses] == [3.0 * step + number for number in range(3)]


def test_lists_that_are_only_added_to_have_everything_in_the_order_of_the_microbatches() -> None:
    module = Keeping()
    places = Places(module)
    for step in range(1, 3):
        turns(module, attributes(module, places), clear="never")
        assert [loss.item() for loss in module.losses] == [0.0, 1.0, 10.0, 11.0] * step


def test_a_list_that_a_microbatch_has_found_empty_stays_so_when_an_earlier_one_is_through() -> None:
    module, loss = Keeping(), torch.zeros((), requires_grad=True)
    state = attributes(module)
    state.begin(0)
    module.losses.append(loss)
    state.suspend(0, through=False)
    state.begin(1)
    module.losses.clear()
    state.suspend(1, through=False)
    state.begin(0)
    state.suspend(0, through=True)
    state.begin(1)
    assert module.losses == []


def test_a_list_of_parameters_that_a_microbatch_makes_anew_is_for_all() -> None:
    module = Keeping()
    weight = nn.Parameter(torch.zeros(()))
    state = attributes(module)
    state.begin(0)
    module.losses = [weight]  # as torch's LSTM does where its weights are other objects than before
    state.suspend(0, through=False)
    state.begin(1)
    assert module.losses == [weight]


def test_changing_what_a_later_microbatch_has_used_is_refused() -> None:
    module = Keeping()
    state, kept = attributes(module), torch.zeros(())
    put_tag(kept, Tag(0))
    state.begin(0)
    module.loss = kept
    state.suspend(0, through=False)
    state._context.borrowed.add(kept._opensmd_tag)  # as when microbatch 1 uses it
    state.begin(0)
    module.loss = torch.ones(())
    with pytest.raises(SMPError, match="microbatch 0 has changed 'loss' after a later microbatch had used"):
        state.suspend(0, through=False)

"""What calls and microbatches leave in modules and containers, in one process."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.restoring import untouched
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.calls.call import Call
from opensmd.modelparallel.runtime.calls.descriptions import Hidden, Left
from opensmd.modelparallel.runtime.side_effects.attributes import AttributesPerMicrobatch, Places
from opensmd.modelparallel.runtime.side_effects.buffers import OrderedBuffers
from opensmd.modelparallel.runtime.side_effects.containers import (
    Containers,
    added,
    containers_in,
    content_of,
    joined,
    set_content,
)
from opensmd.modelparallel.runtime.side_effects.effects import Effects, apply
from opensmd.modelparallel.runtime.side_effects.slots import ABSENT, Slot, slots_of
from opensmd.modelparallel.runtime.side_effects.watch import Watch
from opensmd.modelparallel.runtime.tensors.tags import Tag, put_tag


class Keeping(nn.Linear):
    """Has attributes, a container, and a buffer."""

    mean: Tensor
    loss: Any

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.losses: list[Any] = []
        self.count = 0


# --- slots and containers --------------------------------------------------------------------------------


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


# --- effects of one call ---------------------------------------------------------------------------------


def told(module: Keeping, other: Keeping, change: Any) -> list[Tensor]:
    """Do ``change`` to ``module``, and what the other ranks are told of it to ``other``; the new tensors."""
    effects = Effects(((), {}), [], ((), {}), [], module)
    change(module)
    found = effects.found([])
    if found is None:
        return []
    left = Left(found.pickled, found.contents, tuple(found.tensors))  # type: ignore[arg-type]
    apply(left, ((), {}), [], other, [], lambda tensor: tensor)  # type: ignore[arg-type, return-value]
    return list(found.tensors)


def test_attributes_and_contents_that_a_call_has_changed_are_changed_elsewhere() -> None:
    module, other = Keeping(), Keeping()
    one, two = torch.ones(()), torch.zeros(())
    assert told(module, other, lambda each: each.losses.append(one)) == [one]
    kept = other.losses
    assert told(module, other, lambda each: each.losses.insert(0, two)) == [two]
    assert other.losses is kept and [each is one for each in kept] == [False, True]
    told(module, other, lambda each: each.losses.clear())
    told(module, other, lambda each: setattr(each, "count", 4))
    told(module, other, lambda each: setattr(each, "loss", one))
    assert kept == [] and other.count == 4 and other.loss is one
    assert told(module, other, lambda each: None) == []


def test_a_container_with_another_content_elsewhere_is_only_added_to() -> None:
    module, other = Keeping(), Keeping()
    module.losses, other.losses = [object(), object()], []
    told(module, other, lambda each: each.losses.append(1))
    assert other.losses == [1]
    module.losses, other.losses = [object(), object()], []
    with pytest.raises(SMPError, match="another content on this rank"):
        told(module, other, lambda each: each.losses.reverse())


def watched(function: Any, *args: Tensor, owner: nn.Module | None = None) -> tuple[Watch, Any]:
    call = Call("it", "key", function, args, {}, list(args), [None] * len(args), owner=owner)
    with Watch(call, (args, {}), args, first=True) as watch:
        result = function(*args)
    return watch, watch.description(Hidden.of(result, "it"))


def test_a_watched_call_tells_what_it_has_written_and_whether_its_result_depends_on_data() -> None:
    _, plain = watched(torch.neg, torch.ones(2))
    assert plain.is_plain and not plain.depends_on_data
    _, counting = watched(torch.nonzero, torch.ones(2))
    assert counting.depends_on_data
    _, writing = watched(lambda x, y: torch.add(x, 1, out=y), torch.ones(2), torch.ones(2))
    assert [tuple(change) for change in writing.changed] == [(1, False, True)]
    _, reshaping = watched(lambda x: x.unsqueeze_(0), torch.ones(2))
    assert [tuple(change) for change in reshaping.changed] == [(0, False, False)]


def test_a_watched_call_tells_whether_it_has_changed_buffers() -> None:
    norm, x = nn.BatchNorm1d(2), torch.randn(4, 2)
    assert watched(norm, x, owner=norm)[0].changed_buffers()
    assert not watched(norm.eval(), x, owner=norm)[0].changed_buffers()


# --- state of microbatches that take turns ---------------------------------------------------------------


def attributes(module: nn.Module, places: Places | None = None) -> AttributesPerMicrobatch:
    context: Any = SimpleNamespace(new_calls=1, borrowed=set())
    return AttributesPerMicrobatch(places or Places(module), context, alone=False)


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


def turns(module: Keeping, state: AttributesPerMicrobatch, *, clear: str) -> list[list[float]]:
    """Two microbatches fill a list in two parts, in turns; what each has in the end."""
    totals: dict[int, list[float]] = {}
    for part in range(2):
        for microbatch in range(2):
            state.begin(microbatch)
            if clear == "first" and part == 0:
                module.losses.clear()
            module.losses.append(torch.tensor(10.0 * microbatch + part, requires_grad=clear != "never"))
            if part == 1:
                totals[microbatch] = [each.item() for each in module.losses]
                if clear == "last":
                    module.losses.clear()
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
        assert [each.item() for each in kept] == ([] if clear == "last" else [10.0, 11.0])


def test_lists_that_are_only_added_to_have_everything_in_the_order_of_the_microbatches() -> None:
    module = Keeping()
    places = Places(module)
    for step in range(1, 3):
        turns(module, attributes(module, places), clear="never")
        assert [each.item() for each in module.losses] == [0.0, 1.0, 10.0, 11.0] * step


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


class Calls:
    """Of a microbatch, as buffers see it."""

    def __init__(self, index: int) -> None:
        self.microbatch: Any = SimpleNamespace(index=index)
        self.waits = 0

    def settle(self) -> None:
        """No backward is deferred here."""

    def wait_for_earlier(self) -> None:
        self.waits += 1


def reads(buffers: OrderedBuffers, module: Keeping, *changing: int) -> list[bool]:
    """Three microbatches read a buffer, and some change it; whether each has waited."""
    microbatches = [Calls(index) for index in range(3)]
    current = microbatches[0]
    with buffers.ordered(lambda: current, lambda slot: None, alone=False):
        for current in microbatches:
            mean = module.mean
            if current.microbatch.index in changing:
                module.mean = mean + 1
    return [each.waits > 0 for each in microbatches]


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
    buffers, current = OrderedBuffers({"part": module}), Calls(1)
    with buffers.ordered(lambda: current, lambda slot: None, alone=False):
        assert module.mean.sum() == 0
        current = Calls(0)
        with pytest.raises(SMPError, match=r"microbatch 0 has changed buffer 'part.mean' after microbatch 1"):
            module.mean = torch.ones(2)
        with pytest.raises(SMPError, match=r"'part.mean'"):
            buffers.written(dict.__getitem__(module._buffers, "mean"))


# --- dry runs --------------------------------------------------------------------------------------------


def test_a_dry_run_leaves_containers_in_containers_and_their_order_as_they_were() -> None:
    module = Keeping()
    module.losses = [1, {"a": [2]}]
    names = list(module._parameters)
    with untouched(module, None):
        module.losses[1]["a"].append(3)
        module.losses.append(4)
        weight = module._parameters.pop("weight")
        module._parameters["weight"] = weight
        module.mean += 1
    assert module.losses == [1, {"a": [2]}] and list(module._parameters) == names
    assert module.mean.sum() == 0

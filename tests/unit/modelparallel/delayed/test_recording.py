"""While a recording is on, large tensors have no data, and what would be done to them can be done later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.delayed.recording import SMALL_BYTES, Disguise, Recording
from opensmd.modelparallel.delayed.tape import values_of
from opensmd.modelparallel.exceptions import SMPError

SIDE = 64  # floats: more than a page
GENERATOR = torch.Generator()


def _set(tensor: Tensor, row: Any, value: float) -> Tensor:
    tensor[row] = value
    return tensor


def _drawn_in_a_view(tensor: Tensor) -> Tensor:
    tensor[1].uniform_()
    assert tensor[1].max().item() < 1.0 < tensor[0].min().item()
    return tensor


@contextmanager
def recorded() -> Iterator[Recording]:
    with ExitStack() as stack:
        recording = stack.enter_context(Recording())
        stack.enter_context(Disguise(recording))
        yield recording


def later(recording: Recording, tensor: Tensor) -> Tensor:
    """What the tensor holds once its operations run."""
    reference = recording.reference(tensor)
    assert reference is not None
    return reference.on(values_of([reference.memory])[reference.memory])


MAKERS: dict[str, Callable[[], Tensor]] = {
    "drawn in place": lambda: torch.empty(SIDE, SIDE).normal_(0, 0.02),
    "computed from others": lambda: torch.randn(SIDE, SIDE) * 0.1 + torch.eye(SIDE),
    "written in part": lambda: torch.zeros(SIDE, SIDE).index_fill_(0, torch.tensor([1, 3]), 2.0),
    "set between brackets": lambda: _set(torch.zeros(SIDE, SIDE), 1, 2.0),
    "drawn in part": lambda: torch.zeros(SIDE, SIDE).index_copy_(
        0, torch.arange(2), torch.empty(2, SIDE).normal_()
    ),
    "drawn in a view": lambda: _drawn_in_a_view(torch.full((SIDE, SIDE), 7.0)),
    "two results at once": lambda: torch.stack(
        torch.frexp(torch.randn(SIDE, SIDE), out=(torch.empty(SIDE, SIDE), torch.empty(SIDE, SIDE).int()))
    ),
    "a view": lambda: torch.arange(2.0 * SIDE * SIDE).view(2, SIDE, SIDE)[1].t(),
    "from what has data": lambda: torch.zeros(SIDE, SIDE).copy_(torch.tensor([3.0])),
    "made by another generator": lambda: torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(5)),
    "drawn by another generator": lambda: torch.empty(SIDE, SIDE).normal_(generator=GENERATOR.manual_seed(5)),
    "taken by lists": lambda: torch.zeros(SIDE, SIDE).copy_(
        torch.randn(SIDE, SIDE)[[*range(9, SIDE), *range(9)], :][:, np.arange(SIDE)[::-1].copy()]
    ),
    "set by lists": lambda: _set(torch.zeros(SIDE, SIDE), [1, 3], 2.0),
    "made where its numbers decide": lambda: torch.randn(SIDE, SIDE).clamp_(
        max=torch.rand(SIDE).max().item()
    ),
}


@pytest.mark.parametrize("how", MAKERS)
def test_what_is_made_later_is_what_would_have_been_made_at_once(how: str) -> None:
    torch.manual_seed(0)
    wanted, drawn_afterwards = MAKERS[how](), torch.rand(2)
    torch.manual_seed(0)
    with recorded() as recording:
        tensor = MAKERS[how]()
        assert torch.equal(torch.rand(2), drawn_afterwards)
    assert tensor.is_meta
    assert torch.equal(later(recording, tensor), wanted)


def test_small_tensors_and_those_of_a_pause_have_their_data_at_once() -> None:
    with recorded() as recording:
        small, least = torch.ones(SMALL_BYTES // 8), torch.ones(SMALL_BYTES // 4)
        recording.paused = True
        large = torch.ones(SIDE, SIDE)
        recording.paused = False
    assert recording.reference(least) is not None
    assert small.sum().item() == SMALL_BYTES // 8 and large.sum().item() == SIDE * SIDE


def test_tensors_without_data_say_that_they_are_where_their_numbers_will_be() -> None:
    with recorded():
        tensor = torch.empty(SIDE, SIDE)
        assert tensor.is_cpu and not tensor.is_meta and tensor.device == torch.device("cpu")
        meant = torch.empty(SIDE, SIDE, device="meta")
        assert meant.is_meta


def test_what_depends_on_numbers_is_told_them() -> None:
    torch.manual_seed(0)
    wanted = torch.randn(SIDE, SIDE)
    torch.manual_seed(0)
    with recorded():
        tensor = torch.randn(SIDE, SIDE)
        assert tensor.max().item() == wanted.max().item()
        assert torch.equal(tensor.nonzero(), wanted.nonzero())
        assert [number.item() for number in tensor[0]] == wanted[0].tolist()


@pytest.mark.parametrize("kept", [True, False])
def test_lists_and_arrays_have_the_numbers_and_cannot_be_written_to(kept: bool) -> None:
    torch.manual_seed(3)
    plain = torch.randn(SIDE, SIDE)
    torch.manual_seed(3)
    with recorded() as recording:
        tensor = torch.randn(SIDE, SIDE)
        if not kept:
            recording._kept.clear()
        assert tensor.tolist() == plain.tolist()
        assert tensor[1:].t().tolist() == plain[1:].t().tolist()
        for array in (tensor.numpy(), np.asarray(tensor), np.asarray(tensor, dtype=np.float64)):
            assert np.array_equal(array, plain.numpy().astype(array.dtype))
            assert torch.equal(torch.from_numpy(array.copy()), plain.to(torch.from_numpy(array.copy()).dtype))
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1.0
        with pytest.raises(RuntimeError, match="requires grad"):
            nn.Parameter(tensor).numpy()
        assert torch.ones(2).numpy().flags.writeable
    assert recording.reference(tensor) is not None, "it has been given data"


def test_numbers_that_are_kept_are_given_up_when_others_are_written_over_them() -> None:
    with recorded():
        tensor, others = torch.randn(SIDE, SIDE), torch.full((SIDE, SIDE), 3.0)
        tensor.copy_(others)
        assert tensor.max().item() == 3.0


def test_a_small_tensor_counts_as_it_was_when_it_was_used() -> None:
    with recorded() as recording:
        used = torch.tensor([3.0])
        tensor = torch.zeros(SIDE, SIDE).copy_(used)
        used.fill_(5.0)
    assert later(recording, tensor).unique().tolist() == [3.0]


def test_what_is_like_a_tensor_with_data_has_data() -> None:
    plain = torch.ones(SIDE, SIDE)
    with recorded():
        made = torch.zeros_like(plain)
    assert made.sum().item() == 0.0


def test_a_tensor_without_a_row_of_memory_has_data() -> None:
    with recorded():
        made = torch.sparse_coo_tensor(size=(SIDE, SIDE))
    assert made.to_dense().sum().item() == 0.0


def test_a_tensor_with_data_that_would_be_filled_from_one_without_is_filled() -> None:
    plain = torch.zeros(4)
    with recorded():
        plain.copy_(torch.full((SIDE, SIDE), 3.0)[0, :4])
    assert plain.tolist() == [3.0] * 4


def test_an_operation_that_needs_numbers_to_write_is_refused() -> None:
    with recorded():
        tensor = torch.zeros(SIDE, SIDE)
        with pytest.raises(SMPError, match="needs the numbers of parameters whose initialization is delayed"):
            torch.nonzero(torch.ones(2, 2), out=tensor.view(torch.int64))


def test_a_later_recording_goes_on_with_the_memory_of_an_earlier_one() -> None:
    with recorded() as first:
        tensor = torch.ones(SIDE, SIDE)
    reference = first.reference(tensor)
    assert reference is not None
    with recorded() as second:
        assert second.reference(tensor) is None
        second.know(reference.memory)
        tensor.mul_(3)
    assert later(second, tensor).unique().tolist() == [3.0]

"""Tensors in the form that an engine can carry."""

from __future__ import annotations

import torch

from opensmd.legacy.transports.wire import Wire, as_bytes, bytes_of, in_memory, is_in_memory


def test_a_tensor_that_waits_to_be_conjugated_or_lies_apart_is_brought_into_memory() -> None:
    conjugate = torch.tensor([1 + 2j]).conj()
    transposed = torch.arange(6).view(2, 3).t()
    for tensor in (conjugate, transposed):
        assert not is_in_memory(tensor)
        brought = in_memory(tensor)
        assert is_in_memory(brought) and torch.equal(brought, tensor)
    plain = torch.ones(2)
    assert in_memory(plain) is plain


def test_types_that_an_engine_does_not_move_travel_as_their_bytes() -> None:
    wire = Wire("cpu", moves=frozenset({torch.float32}))
    half = torch.ones(3, dtype=torch.bfloat16)
    moved = wire.moved(half)
    assert moved.dtype is torch.uint8 and moved.data_ptr() == half.data_ptr() and moved.numel() == 6
    assert wire.moved(torch.ones(3)).dtype is torch.float32
    assert not wire.moves_all and Wire("cpu").moves_all


def test_types_that_must_be_reduced_in_another_are_taken_for_moving_alone() -> None:
    wire = Wire("cpu", reduces_as={torch.float16: torch.float32})
    half = torch.ones(3, dtype=torch.float16)
    assert wire.takes(half, reducing=False) and not wire.takes(half, reducing=True)
    assert wire.for_reducing(half).dtype is torch.float32 and wire.for_moving(half).dtype is torch.float16


def test_an_engine_of_another_device_does_not_reach_memory_here() -> None:
    assert not Wire("cuda").is_here(torch.ones(1)) and Wire("cpu").is_here(torch.ones(1))
    assert Wire("cuda").place(torch.ones(1)).type == "cuda"


def test_bytes_are_those_of_the_memory_itself() -> None:
    tensor = torch.tensor([1, 2], dtype=torch.int16)
    view = bytes_of(tensor)
    view[0] = 7
    assert tensor[0] == 7 and as_bytes(tensor).tolist() == [7, 0, 2, 0]

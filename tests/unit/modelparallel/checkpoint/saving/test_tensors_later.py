"""The file has what tensors are when their turn comes, and reads as one with tensors that exist."""

from __future__ import annotations

import io

import torch
from torch import Tensor

from opensmd.modelparallel.checkpoint.saving.tensors_later import TensorLater


def test_a_tensor_is_fetched_once_when_its_turn_in_the_file_comes() -> None:
    fetched = []

    def fetch(number: int, whole: Tensor) -> Tensor:
        fetched.append(number)
        return whole

    first, second = torch.randn(12), torch.arange(5, dtype=torch.bfloat16)
    memory = TensorLater.memory_for(12, first.dtype, lambda: fetch(1, first))
    rest = TensorLater.memory_for(5, second.dtype, lambda: fetch(2, second))
    content = {
        "matrix": TensorLater(memory, (3, 4), first.dtype),
        "here": torch.ones(2),
        "other": TensorLater(rest, (5,), second.dtype),
        "row": TensorLater(memory, (12,), first.dtype),
    }
    file = io.BytesIO()
    torch.save(content, file)
    assert fetched == [1, 2]
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert torch.equal(found["matrix"], first.view(3, 4))
    assert torch.equal(found["row"], first)
    assert found["row"].data_ptr() == found["matrix"].data_ptr()
    assert torch.equal(found["other"], second)
    assert torch.equal(found["here"], torch.ones(2))
    assert found["matrix"].device.type == "cpu"


def test_a_tensor_without_elements_is_written_too() -> None:
    memory = TensorLater.memory_for(0, torch.float32, lambda: torch.empty(0))
    file = io.BytesIO()
    torch.save(TensorLater(memory, (0, 3), torch.float32), file)
    file.seek(0)
    assert torch.load(file, weights_only=True).shape == (0, 3)

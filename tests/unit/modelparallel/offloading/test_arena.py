"""Room in a file, taken, given back and used again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from opensmd.modelparallel.offloading.arena import Arena


def test_tensors_come_back_with_every_bit_whatever_their_type_and_shape(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path))
    tensors = [
        torch.randn(3, 1000),
        torch.randn(5).bfloat16(),
        torch.tensor([True, False]),
        torch.arange(7),
        torch.tensor(float("nan")),
    ]
    places = [arena.take(tensor.nbytes) for tensor in tensors]
    for tensor, place in zip(tensors, places, strict=True):
        arena.write(tensor, place)
    for tensor, place in zip(tensors, places, strict=True):
        read = torch.empty_like(tensor)
        arena.read(read, place)
        assert torch.equal(read.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_room_that_was_given_back_is_used_again_by_what_fits_exactly(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path))
    first, second = arena.take(5000), arena.take(5000)
    assert abs(first - second) >= 5000 and arena.bytes == 4 * 4096
    arena.give_back(first, 5000)
    assert arena.take(4096) not in (first, second)
    assert arena.take(8192) == first


def test_the_file_has_no_name(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path))
    arena.write(torch.ones(10), arena.take(40))
    assert list(tmp_path.iterdir()) == []


def test_writes_that_the_disk_takes_in_pieces_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, tensor, write = Arena(str(tmp_path)), torch.arange(100), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:300], offset))
    arena.write(tensor, 0)
    monkeypatch.undo()
    read = torch.empty_like(tensor)
    arena.read(read, 0)
    assert torch.equal(read, tensor)


def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    arena = Arena(str(tmp_path))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=f"into {tmp_path}: No space left.*OPENSMD_OFFLOAD_DIR"):
        arena.write(torch.ones(1), 0)


def test_reading_behind_the_end_raises_and_does_not_wait(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="ends at byte 0"):
        Arena(str(tmp_path)).read(torch.ones(1), 0)

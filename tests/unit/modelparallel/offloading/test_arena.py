"""Room in a file, taken, given back and used again."""

from __future__ import annotations

import itertools
import os
import random
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


def test_room_that_was_given_back_is_used_again_by_what_fits_best(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path))
    sizes = [5000, 100, 4097, 4096, 20000]
    places = [arena.take(size) for size in sizes]
    assert arena.bytes == (2 + 1 + 2 + 1 + 5) * 4096
    arena.give_back(places[4], sizes[4])
    arena.give_back(places[0], sizes[0])
    assert arena.take(8192) == places[0]
    arena.give_back(places[2], sizes[2])
    arena.give_back(places[1], sizes[1])
    assert arena.take(3 * 4096) == places[1]  # of both together
    assert arena.bytes == 11 * 4096


def test_batches_of_many_lengths_need_no_more_than_the_longest_ones(tmp_path: Path) -> None:
    arena, rng = Arena(str(tmp_path)), random.Random(0)
    largest = 0
    for _ in range(200):
        sizes = [rng.randrange(1, 40) * 4096] * 6  # one step's layers
        taken = [(arena.take(size), size) for size in sizes]
        ranges = sorted((at, at + size) for at, size in taken)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        largest = max(largest, sum(sizes))
        for at, size in rng.sample(taken, len(taken)):
            arena.give_back(at, size)
    assert arena.bytes <= largest


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

"""Tensors of every layout come back from the file as they were, and its room is used again."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from opensmd.modelparallel.offloading.file_store import FileStore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_comes_back_with_its_values_strides_and_type(tmp_path: Path, dtype: torch.dtype) -> None:
    store = FileStore(str(tmp_path))
    plain = (torch.rand(4, 3, 5, 2) * 9).to(dtype)
    images = plain.to(memory_format=torch.channels_last)
    for tensor in (plain, plain.mT, images, plain[1:, :, ::2], plain[0, 0, 0, 0]):
        stored = store.put(tensor)
        back = stored.fetch().result()
        assert torch.equal(back, tensor) and back.dtype == tensor.dtype
        assert stored.is_written()
    assert store.put(images).fetch().result().is_contiguous(memory_format=torch.channels_last)
    assert not list(tmp_path.iterdir()), "the file has no name that could be left behind"


def test_room_is_used_again_when_nobody_refers_to_a_tensor(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    stored = [store.put(torch.full((100,), float(number))) for number in range(3)]
    assert [one.fetch().result()[0].item() for one in stored] == [0.0, 1.0, 2.0]
    size = store.arena.bytes
    del stored
    again = [store.put(torch.full((100,), float(number))) for number in range(3)]
    assert store.arena.bytes == size
    assert [one.fetch().result()[0].item() for one in again] == [0.0, 1.0, 2.0]


def test_a_tensor_that_is_changed_while_it_is_written_is_refused(tmp_path: Path) -> None:
    store, gate, tensor = FileStore(str(tmp_path)), threading.Event(), torch.ones(100)
    store.writer.submit(gate.wait)
    stored = store.put(tensor)
    tensor.add_(1)
    gate.set()
    with pytest.raises(RuntimeError, match=r"of shape \(100,\), was changed in place"):
        stored.wait_until_written()


def test_a_full_disk_says_which_folder_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = FileStore(str(tmp_path))
    monkeypatch.setattr(os, "pwrite", full)
    stored = store.put(torch.ones(3))
    with pytest.raises(
        OSError, match=f"could not be offloaded into {tmp_path}: No space left .*OPENSMD_OFFLOAD_DIR"
    ):
        stored.fetch().result()

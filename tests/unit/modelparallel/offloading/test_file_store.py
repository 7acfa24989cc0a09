"""Tensors of every layout come back from the file as they were, and its room is used again."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from opensmd.modelparallel.offloading.file_store import FileStore
from opensmd.modelparallel.runtime.tensors.storages import StorageReference


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


class Hoarder(ThreadPoolExecutor):
    """Keeps all that it was given and that came of it, as a thread does until its turn comes again."""

    def __init__(self) -> None:
        super().__init__(1)
        self.kept: list[Any] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self.kept.append((args, kwargs, future))
        return future


def test_threads_that_are_late_keep_no_tensor_in_memory(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    store.writer, store.reader = Hoarder(), Hoarder()
    tensor = torch.ones(4)
    before = StorageReference(tensor.untyped_storage())
    stored = store.put(tensor)
    del tensor
    stored.wait_until_written()
    assert before.expired()
    tensor = stored.fetch().result()
    after = StorageReference(tensor.untyped_storage())
    del tensor
    assert after.expired()


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

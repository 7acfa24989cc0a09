"""CPU activations in an arena's file, written and read by threads in parallel to the computation."""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from opensmd.modelparallel.offloading.arena import Arena

__all__ = ["FileStore", "FromFile", "InFile"]


class FileStore:
    """Stores CPU tensors in a file.

    One thread writes and another reads, so that what a backward waits for does not queue behind a forward's
    writes.

    Args:
        folder: where the file is.
    """

    def __init__(self, folder: str) -> None:
        self.arena = Arena(folder)
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="smp-offload-write")
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="smp-offload-read")

    def put(self, tensor: Tensor) -> InFile:
        """Start writing the tensor."""
        return InFile(self, tensor)


class InFile:
    """A tensor in the file, for as long as this object is referenced."""

    def __init__(self, store: FileStore, tensor: Tensor) -> None:
        self._store = store
        # dimensions by descending stride: contiguous in this order, if the tensor is dense
        self._order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        ordered = tensor.detach().permute(self._order)
        self._shape, self._dtype = ordered.shape, ordered.dtype
        size = int(tensor.numel()) * tensor.element_size()
        self._offset = store.arena.take(size)
        self._writing: Future[None] = store.writer.submit(
            _write, store.arena, [ordered], ordered._version, self._offset
        )
        weakref.finalize(self, store.arena.give_back, self._offset, size).atexit = False

    def is_written(self) -> bool:
        """Whether the tensor's own memory is no longer needed."""
        return self._writing.done()

    def wait_until_written(self) -> None:
        """Wait until it is written.

        Raises:
            OSError: it could not be written.
        """
        self._writing.result()

    def fetch(self) -> FromFile:
        """Start reading the tensor."""
        read: list[Tensor] = []
        return FromFile(self._store.reader.submit(self._read, read), read)

    def _read(self, read: list[Tensor]) -> None:
        self._writing.result()
        tensor = torch.empty(self._shape, dtype=self._dtype, device="cpu")
        self._store.arena.read(tensor, self._offset)
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        read.append(tensor.permute(inverse))


class FromFile:
    """A tensor on its way back.

    Args:
        reading: done when the tensor is read.
        read: contains the tensor then. It is not the future's result, because the thread keeps the future for
            a while.
    """

    def __init__(self, reading: Future[None], read: list[Tensor]) -> None:
        self._reading = reading
        self._read = read

    def result(self) -> Tensor:
        """Wait for the tensor and return it; may be called once.

        Raises:
            OSError: it could not be written or read.
        """
        self._reading.result()
        return self._read.pop()


def _write(arena: Arena, given: list[Tensor], version: int, offset: int) -> None:
    """Write the tensor in ``given`` and remove it, because the thread keeps its arguments after the end."""
    ordered = given.pop()
    arena.write(ordered.contiguous(), offset)
    if ordered._version != version:
        raise RuntimeError(
            f"the input of a checkpointed layer, of shape {tuple(ordered.shape)}, was changed in place while "
            "it was offloaded: the layer would compute something else in backward. Let the layer, and what "
            "follows it, leave the input as it is, or do not checkpoint it"
        )

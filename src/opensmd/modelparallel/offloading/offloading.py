"""Which activations of checkpointed layers stay in memory: at most ``activation_loading_horizon`` layers'.

A layer's input leaves while the layer runs, and comes back before its backward, later layers first::

    forward    layer 0   1   2   3 ...      each input is written while the next layers run
    backward   layer 9   8   7   6 ...      with a horizon of 3, inputs 8 and 7 are read while 9 is used

Inputs that are being written, read ahead or used count; so at most horizon - 1 are in transit.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from opensmd.modelparallel.offloading.file_store import FileStore
from opensmd.modelparallel.offloading.pinned_store import PinnedStore
from opensmd.script_level import script_level

__all__ = ["Offloading"]


class Fetching(Protocol):
    """A tensor on its way back."""

    def result(self) -> Tensor:
        """Wait for the tensor and return it."""


class Stored(Protocol):
    """A tensor outside the device's memory."""

    def is_written(self) -> bool:
        """Whether the tensor's own memory is no longer needed."""

    def wait_until_written(self) -> None:
        """Wait until the tensor is stored completely."""

    def fetch(self) -> Fetching:
        """Start bringing it back."""


class Activation:
    """A layer's input, linked to the previous one, whose backward comes after its own."""

    def __init__(self, stored: Stored, previous: Activation | None) -> None:
        self.stored = stored
        self.fetching: Fetching | None = None
        self._previous = None if previous is None else weakref.ref(previous)

    def previous(self) -> Activation | None:
        """The input that was offloaded before this one, if its backward is yet to come."""
        return None if self._previous is None else self._previous()


class Offloading:
    """The offloaded activations of one process.

    Args:
        horizon: how many layers' inputs may be in memory, at least 1.
        folder: where CPU activations are written.

    Raises:
        ValueError: there is no such folder, or this process may not write there.

    Attributes:
        count: how many tensors have been offloaded.
    """

    def __init__(self, horizon: int, folder: str) -> None:
        if not Path(folder).is_dir():
            raise ValueError(f"OPENSMD_OFFLOAD_DIR={folder!r}: there is no such folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"OPENSMD_OFFLOAD_DIR={folder!r}: this process may not write there")
        self.count = 0
        self._most_in_flight = horizon - 1
        self._folder = folder
        self._stores: dict[torch.device, FileStore | PinnedStore] = {}
        self._writing: list[weakref.ref[Activation]] = []
        self._fetched: weakref.WeakSet[Activation] = weakref.WeakSet()
        self._latest = threading.local()  # each microbatch of a pipeline has its own thread and order
        self._lock = threading.RLock()

    @classmethod
    def asked_for(cls, horizon: int) -> Offloading:
        """Create it with the folder in ``OPENSMD_OFFLOAD_DIR``, or else the system's temporary folder."""
        return cls(horizon, os.environ.get("OPENSMD_OFFLOAD_DIR") or tempfile.gettempdir())

    def warn_if_idle(self) -> None:
        """Check the first step for activation checkpoints.

        Warns:
            UserWarning: the step had none.
        """
        if not self.count:
            warnings.warn(
                "offload_activations=True has had no effect in the first step: only inputs of activation "
                "checkpoints are offloaded, and none ran on this rank. Call "
                "smp.set_activation_checkpointing on the model's layers",
                stacklevel=script_level(),
            )

    @contextlib.contextmanager
    def of_inputs(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Offload the activations among ``inputs`` that a checkpoint saves inside."""
        wanted = {_place(tensor) for tensor in inputs if _is_activation(tensor)}

        def pack(tensor: Tensor) -> Tensor | Activation:
            return self._put(tensor) if _place(tensor) in wanted else tensor

        def unpack(packed: Tensor | Activation) -> Tensor:
            return self._take(packed) if isinstance(packed, Activation) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _put(self, tensor: Tensor) -> Activation:
        self.count += 1
        latest: weakref.ref[Activation] | None = getattr(self._latest, "activation", None)
        with torch.no_grad(), self._lock:
            previous = None if latest is None else latest()
            activation = Activation(self._store(tensor.device).put(tensor), previous)
            self._latest.activation = weakref.ref(activation)
            self._writing = [known for known in self._writing if _is_being_written(known())]
            self._writing.append(weakref.ref(activation))
            while self._writing and len(self._writing) + len(self._fetched) > self._most_in_flight:
                oldest = self._writing.pop(0)()
                if oldest is not None:
                    oldest.stored.wait_until_written()
        return activation

    def _take(self, activation: Activation) -> Tensor:
        with torch.no_grad(), self._lock:
            self._fetched.discard(activation)
            fetching, activation.fetching = activation.fetching or activation.stored.fetch(), None
            self._fetch_before(activation)
            return fetching.result()

    def _fetch_before(self, activation: Activation) -> None:
        before = activation.previous()
        for _ in range(self._most_in_flight):
            if before is None or len(self._fetched) >= self._most_in_flight:
                return
            if before.fetching is None:
                before.fetching = before.stored.fetch()
                self._fetched.add(before)
            before = before.previous()

    def _store(self, device: torch.device) -> FileStore | PinnedStore:
        if device not in self._stores:
            on_cpu = device.type == "cpu"
            self._stores[device] = FileStore(self._folder) if on_cpu else PinnedStore(device)
        return self._stores[device]


def _is_activation(tensor: Tensor) -> bool:
    """Whether it is neither an input of the step nor a parameter, which stay in memory anyway."""
    return (
        tensor.requires_grad and not tensor.is_leaf and tensor.layout is torch.strided and tensor.numel() > 0
    )


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _is_being_written(activation: Activation | None) -> bool:
    return activation is not None and not activation.stored.is_written()

"""The memory of a rank's process besides tensors, for interpreter and libraries, after a dry run."""

from __future__ import annotations

import gc
import itertools

from torch import nn

from opensmd.environment.process_memory import anonymous_bytes, give_back_freed

__all__ = ["interpreter_bytes", "own_bytes"]


def interpreter_bytes(model: nn.Module) -> int:
    """Return :func:`own_bytes` minus the tensors of ``model``."""
    return max(0, own_bytes() - _bytes_of(model))


def own_bytes() -> int:
    """Return this process's private bytes, without files and shared memory; 0 if the system does not say.

    Freed memory is first returned to the system.
    """
    gc.collect()
    return anonymous_bytes() if give_back_freed() else 0


def _bytes_of(model: nn.Module) -> int:
    tensors = itertools.chain(model.parameters(), model.buffers())
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

"""What a rank's process has of its own beside tensors: interpreter and libraries, after a dry run."""

from __future__ import annotations

import ctypes
import gc
import itertools
from pathlib import Path

from torch import nn

__all__ = ["interpreter_bytes", "own_bytes"]


def interpreter_bytes(model: nn.Module) -> int:
    """:func:`own_bytes` without the tensors of ``model``."""
    return max(0, own_bytes() - _bytes_of(model))


def own_bytes() -> int:
    """Bytes of this process's own, without files and what it shares; 0 where the system does not tell.

    What has been freed is given back to the system first.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        lines = Path("/proc/self/status").read_text().splitlines()
    except (OSError, AttributeError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def _bytes_of(model: nn.Module) -> int:
    tensors = itertools.chain(model.parameters(), model.buffers())
    storages = [each.untyped_storage() for each in tensors if each.device.type == "cpu"]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

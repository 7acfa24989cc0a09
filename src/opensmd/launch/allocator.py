"""Making the C library's allocator keep freed memory for the next step.

glibc returns large blocks to the kernel at once and gets them back, zeroed and page by page, in the next
step: that takes up to a tenth of a step with activations of megabytes (``benchmarks/allocator``). Training
needs the same memory in every step, so keeping it hardly changes the peak, unless single blocks have more
than 100 MiB: these may not fit into the gaps that others have left.

Microbatches take turns on threads. glibc would give each thread its own heap, whose kept memory is useless to
the others. With one heap for all, ranks of a split model kept 390 MiB on top of their initial size instead of
510; 218 were in use.

A heap gets fragmented. Ranks of a split model, whose tensors may be large compared to all their memory, take
these from memory that does not (``runtime/tensor_memory``).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

from opensmd.environment.settings import KEEP_TENSORS

__all__ = ["chosen_by_user", "keeping_memory"]

_CHOICES = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)
_KEPT_BYTES = (1 << 31) - 1  # the largest number that every version accepts
_MAPPED_BYTES = 1 << 30
_MAPPED_BYTES_BEFORE_2_36 = 32 << 20  # older versions refuse more


def chosen_by_user(environ: Mapping[str, str]) -> str | None:
    """Return the variable that selects an allocator or its thresholds, if one is set."""
    return next((name for name in _CHOICES if environ.get(name)), None)


def keeping_memory(environ: Mapping[str, str], library: tuple[str, str] | None = None) -> dict[str, str]:
    """Return variables that make ranks keep memory; none if the user has chosen, or without glibc.

    Args:
        environ: of the launcher.
        library: name and version of the C library; by default, this process's.
    """
    name, version = library or platform.libc_ver()
    if name != "glibc" or chosen_by_user(environ) is not None:
        return {}
    known = tuple(int(part) for part in version.split(".")[:2]) >= (2, 36)
    mapped = _MAPPED_BYTES if known else _MAPPED_BYTES_BEFORE_2_36
    return {
        "MALLOC_MMAP_THRESHOLD_": str(mapped),
        "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES),
        "MALLOC_ARENA_MAX": environ.get("MALLOC_ARENA_MAX") or "1",
        KEEP_TENSORS: environ.get(KEEP_TENSORS) or "1",
    }

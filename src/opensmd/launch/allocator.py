"""How the C library's allocator treats memory that a rank gives back: kept for the next step.

glibc gives large blocks back to the kernel at once and takes them again, zeroed and page by page, in the next
step: up to a tenth of a step with activations of megabytes (``benchmarks/allocator``). Ranks that train need
the same memory in every step, so that keeping it changes their peak little, unless single blocks have more
than 100 MiB: these may not fit into what others have left behind.

Microbatches take turns on threads. glibc would give each thread a heap of its own, and what one keeps is of
no use to the next. With one heap for all, ranks of a split model kept 390 MiB beyond their start in place of
510; 218 were in use.

A heap has holes. Ranks of a split model, whose tensors may be large beside all they have, take these from
memory without any (``runtime/tensor_memory``).
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
_KEPT_BYTES = (1 << 31) - 1  # the largest number that every version takes
_MAPPED_BYTES = 1 << 30
_MAPPED_BYTES_BEFORE_2_36 = 32 << 20  # older versions refuse more


def chosen_by_user(environ: Mapping[str, str]) -> str | None:
    """The variable that chooses an allocator or its thresholds, if one is set."""
    return next((name for name in _CHOICES if environ.get(name)), None)


def keeping_memory(environ: Mapping[str, str], library: tuple[str, str] | None = None) -> dict[str, str]:
    """The variables that make ranks keep memory; none where the user has chosen, or without glibc.

    Args:
        environ: of the launcher.
        library: name and version of the C library; default: this process's.
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

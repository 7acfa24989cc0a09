"""What of a rank's process is resident, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MIB", "forget_the_most", "most_anonymous", "of_ranks"]

MIB = 2**20


def most_anonymous() -> int:
    """Bytes of this process's own, without what others share, at their most since :func:`forget_the_most`."""
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def forget_the_most() -> None:
    """Let the kernel count anew."""
    Path("/proc/self/clear_refs").write_text("5")


def of_ranks() -> int:
    """Bytes of memory that ranks share with each other, this one's part: among them DDP's gradients."""
    return _of_file("smaps_rollup", "Pss_Shmem")


def _status(name: str) -> int:
    return _of_file("status", name)


def _of_file(file: str, name: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

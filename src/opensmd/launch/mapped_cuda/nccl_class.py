"""``dist.ProcessGroupNCCL`` where NCCL is smddp: scripts make options of it, and ask for its groups."""

from __future__ import annotations

from types import SimpleNamespace

__all__ = ["ProcessGroupNCCL"]


class _NcclOptions(SimpleNamespace):
    """Takes what scripts set for NCCL; groups of smddp are made without it."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())


class ProcessGroupNCCL:
    """The class that no group is an instance of."""

    Options = _NcclOptions

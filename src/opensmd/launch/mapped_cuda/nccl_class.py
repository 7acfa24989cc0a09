"""``dist.ProcessGroupNCCL`` when NCCL is smddp: scripts create its options, and check for its groups."""

from __future__ import annotations

from types import SimpleNamespace

__all__ = ["ProcessGroupNCCL"]


class _NcclOptions(SimpleNamespace):
    """Accepts what scripts set for NCCL; smddp ignores it."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())


class ProcessGroupNCCL:
    """A class without instances."""

    Options = _NcclOptions

"""Data parallelism: the smddp backend for torch.distributed, and the v1 interface."""

from opensmd.dataparallel import INTERFACE_VERSION as __version__

__all__ = ["__version__"]

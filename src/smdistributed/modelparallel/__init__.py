"""Model parallelism; scripts import :mod:`smdistributed.modelparallel.torch` as ``smp``."""

from opensmd.modelparallel import INTERFACE_VERSION as __version__

__all__ = ["__version__"]

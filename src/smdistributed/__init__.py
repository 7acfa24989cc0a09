"""The import paths that training scripts use; every line of logic is in :mod:`opensmd`."""

from opensmd import __version__

__all__ = ["__version__"]

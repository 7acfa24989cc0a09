"""The error of the compiled core, in its own file because all others here raise it."""

from __future__ import annotations

__all__ = ["BuildError"]


class BuildError(RuntimeError):
    """The native core cannot be built or loaded here; the message says why and what to do."""

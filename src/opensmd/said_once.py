"""Warnings that a script gets only once, however often it causes them."""

from __future__ import annotations

import functools
import warnings

from opensmd.script_level import script_level

__all__ = ["warn_once"]


@functools.cache
def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with ``message``, but only the first time.

    Warns:
        category: the message.
    """
    warnings.warn(message, category, stacklevel=script_level())

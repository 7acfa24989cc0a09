"""Warnings that a script is given once, however often it asks for what they are about."""

from __future__ import annotations

import functools
import warnings

__all__ = ["warn_once"]


@functools.cache
def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn about ``message`` the first time.

    Warns:
        category: the message.
    """
    warnings.warn(message, category, stacklevel=4)

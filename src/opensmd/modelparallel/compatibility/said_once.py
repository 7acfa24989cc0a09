"""Warnings that a script is given once, however often it asks for what they are about."""

from __future__ import annotations

import functools
import warnings

__all__ = ["warn_once"]


@functools.cache
def warn_once(message: str) -> None:
    """Warn about ``message`` the first time.

    Warns:
        UserWarning: the message.
    """
    warnings.warn(message, stacklevel=4)

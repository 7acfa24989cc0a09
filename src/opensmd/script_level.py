"""Where warnings point: at the script's own line, whatever of this package and torch lies between."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

__all__ = ["script_level"]

_BETWEEN = (f"{Path(__file__).parent}/", f"{Path(torch.__file__).parent}/", contextlib.__file__)


def script_level() -> int:
    """Return the ``stacklevel`` with which the caller's ``warnings.warn`` names the script's line.

    That is the first line outside this package, torch and ``contextlib``; the outermost one if there is none.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level

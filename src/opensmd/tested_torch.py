"""The versions of torch that this package is tested with, and what is said on any other.

Large parts lean on torch's private parts, which change between minor versions. The package's metadata bounds
torch to these versions; a torch installed past that bound gets one warning, before anything is imported that
the other torch may not have. So this file does not load torch.
"""

from __future__ import annotations

import os
import re
import warnings
from functools import cache
from importlib import metadata

from opensmd.environment.detect import detect

__all__ = ["NEWEST", "OLDEST", "REQUIREMENT", "is_tested", "warn_if_untested"]

OLDEST = (2, 13)
NEWEST = (2, 15)
REQUIREMENT = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


def is_tested(version: str) -> bool:
    """Whether the minor version of ``version``, as ``torch.__version__`` gives it, is a tested one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


@cache
def warn_if_untested() -> None:
    """Say once, on rank 0, that the installed torch is not a tested one.

    Warns:
        RuntimeWarning: its version is outside the tested range.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:  # built in place
        return
    launch = detect(os.environ)
    if is_tested(version) or (launch is not None and launch.rank != 0):
        return
    warnings.warn(
        f"opensmd is tested with torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, and this is torch "
        f"{version}, whose private parts it may use wrongly: expect errors. Install a tested one with "
        f"pip install '{REQUIREMENT}'",
        RuntimeWarning,
        stacklevel=2,
    )

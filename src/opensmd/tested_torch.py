"""The versions of torch that this package is tested with, and the warning on any other.

Much of this package relies on private parts of torch, which change between minor versions. The package's
metadata restricts torch to these versions; a torch installed against it gets one warning, before anything is
imported that it may lack. So this file does not load torch.
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
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and OLDEST <= (int(match[1]), int(match[2])) <= NEWEST


@cache
def warn_if_untested() -> None:
    """Warn once, on rank 0, if the installed torch has not been tested.

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

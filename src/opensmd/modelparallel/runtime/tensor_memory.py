"""Large tensors of smdrun's ranks come from memory kept between steps, but never more than a step needs.

The blocks are in ``csrc/torch/memory``.
"""

from __future__ import annotations

import os

from opensmd.native import core

__all__ = ["end_step", "keep"]

KEEP = "OPENSMD_KEEP_TENSORS"  # smdrun sets it where nobody has chosen an allocator


def keep() -> None:
    """From now on, if the environment says so."""
    if os.environ.get(KEEP) == "1":
        core.keep_tensor_memory()


def end_step() -> None:
    """What earlier steps needed, such as the whole model before it was cut, is not kept any longer."""
    if os.environ.get(KEEP) == "1":
        core.end_step_of_tensor_memory()

"""Taking large tensors of smdrun's ranks from memory kept between steps, at most what a step needs.

The blocks are in ``csrc/torch/memory``.
"""

from __future__ import annotations

import functools

from opensmd.environment.settings import Settings
from opensmd.native import core
from opensmd.native.availability import core_or_reason

__all__ = ["end_step", "keep"]


def keep() -> None:
    """Keep memory from now on, if the environment says so and there is a compiled core."""
    if _is_wanted():
        core.keep_tensor_memory()


def end_step() -> None:
    """Stop keeping what only earlier steps needed, such as the whole model before it was cut."""
    if _is_wanted():
        core.end_step_of_tensor_memory()


@functools.cache
def _is_wanted() -> bool:
    """Read the setting as the process started, because torch's allocator is changed for good."""
    settings = Settings.from_environment()
    return settings.keep_tensors and core_or_reason(settings)[0] is not None

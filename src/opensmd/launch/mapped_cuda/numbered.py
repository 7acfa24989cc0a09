"""``torch.device(0)`` is ``torch.device("cuda", 0)``: torch itself asks an accelerator, which is not there.

Only compiled code can change that, because ``torch.device`` is a type that torch compares by its identity.
Where there is no compiled core, torch's error remains.
"""

from __future__ import annotations

from opensmd.environment.settings import Settings
from opensmd.native.availability import core_or_reason

__all__ = ["forget_numbers", "number_devices"]


def number_devices() -> None:
    """Let a number alone name a CUDA device."""
    _let_numbers_name_cuda(True)


def forget_numbers() -> None:
    """Undo :func:`number_devices`."""
    _let_numbers_name_cuda(False)


def _let_numbers_name_cuda(on: bool) -> None:
    core, _ = core_or_reason(Settings.from_environment())
    if core is not None:
        core.number_cuda_devices(on)

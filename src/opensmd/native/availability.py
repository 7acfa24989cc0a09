"""Whether there is a compiled core here, and if not, why, for code that can do without one."""

from __future__ import annotations

from types import ModuleType

from opensmd.environment.settings import Settings
from opensmd.native import build

__all__ = ["core_or_reason"]


def core_or_reason(settings: Settings) -> tuple[ModuleType | None, str]:
    """Return the compiled core, built first if needed, or why there is none."""
    if not settings.native:
        return None, "OPENSMD_NATIVE=0 is set"
    if settings.build_error is not None:
        return None, "smdrun could not build it, and has said why."
    try:
        return build.load(settings), ""
    except build.BuildError as error:
        return None, str(error)

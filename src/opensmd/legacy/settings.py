"""Settings of ``torch.distributed.deprecated`` from outside the script.

The old API has no argument for a timeout or the network interface, and scripts should not need changes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ENGINES", "Deadline", "LegacySettings"]

ENGINES = ("auto", "smddp", "gloo")


@dataclass(frozen=True)
class LegacySettings:
    """The settings, with their defaults.

    Attributes:
        timeout: seconds that initialisation, a message or a collective may take before it fails
            (``OPENSMD_LEGACY_TIMEOUT``, default 1800, which is torch's own default).
        interface: the network interface for multicast, and for listening if the processes may be on several
            hosts (``OPENSMD_LEGACY_INTERFACE``, default: the system's choice for multicast, and all to listen
            on), for example ``eth0`` or ``lo``.
        engine: what carries collectives of ``tcp`` and ``gloo``: ``smddp``, ``gloo``, or ``auto``, which
            means smddp if all processes share one host and have its native core (``OPENSMD_LEGACY_ENGINE``).
    """

    timeout: float = 1800.0
    interface: str | None = None
    engine: str = "auto"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> LegacySettings:
        """Read the settings from ``environment`` (default: ``os.environ``).

        Raises:
            ValueError: a variable has a value that its setting does not accept.
        """
        env = os.environ if environment is None else environment
        text = env.get("OPENSMD_LEGACY_TIMEOUT") or "1800"
        try:
            timeout = float(text)
        except ValueError:
            timeout = -1.0
        if not timeout > 0:
            raise ValueError(f"OPENSMD_LEGACY_TIMEOUT={text!r}: expected a number of seconds above zero")
        engine = env.get("OPENSMD_LEGACY_ENGINE") or "auto"
        if engine not in ENGINES:
            raise ValueError(f"OPENSMD_LEGACY_ENGINE={engine!r}: expected one of {', '.join(ENGINES)}")
        return cls(timeout, env.get("OPENSMD_LEGACY_INTERFACE") or None, engine)


class Deadline:
    """A point in time, ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """The seconds left, never below zero."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._end

"""The names of schedules in the settings."""

from __future__ import annotations

from typing import Literal

__all__ = ["Pipeline"]

Pipeline = Literal["interleaved", "simple", "1f1b", "zero_bubble", "v", "searched"]

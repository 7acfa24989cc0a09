"""The name of the backend and what it serves: for those that must know it before the backend is there."""

from __future__ import annotations

__all__ = ["DEVICES", "NAME"]

NAME = "smddp"
DEVICES = ["cpu", "cuda"]

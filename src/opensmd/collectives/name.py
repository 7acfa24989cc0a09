"""The backend's name and devices, for code that needs them before the backend is loaded."""

from __future__ import annotations

__all__ = ["DEVICES", "NAME"]

NAME = "smddp"
DEVICES = ["cpu", "cuda"]

"""The states of random number generators in a checkpoint, so that dropout continues as if uninterrupted.

Each rank has its own, and gets them back at the same degrees. At others it gets those of the rank in the
corresponding position, modulo the saved degrees.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import torch

from opensmd.modelparallel.state import state

__all__ = [
    "random_file",
    "random_states",
    "saved_random_file",
    "set_random_states",
]


def random_file(folder: Path) -> Path:
    """Return the file for this rank's states."""
    place = state.grid.coordinates(state.rank)
    return folder / f"random_{place.pipeline}_{place.tensor}_{place.data}.pt"


def random_states() -> dict[str, Any]:
    """Return the states of torch, Python and NumPy (if imported)."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def saved_random_file(folder: Path) -> Path | None:
    """Return the file of the rank in the corresponding position; None if none was saved."""
    matches = (re.fullmatch(r"random_(\d+)_(\d+)_(\d+)\.pt", file.name) for file in folder.iterdir())
    places = [tuple(map(int, match.groups())) for match in matches if match is not None]
    if not places:
        return None
    sizes = [1 + max(axis) for axis in zip(*places, strict=True)]
    own = state.grid.coordinates(state.rank)
    numbers = [own % size for own, size in zip((own.pipeline, own.tensor, own.data), sizes, strict=True)]
    return folder / f"random_{numbers[0]}_{numbers[1]}_{numbers[2]}.pt"


def set_random_states(states: dict[str, Any]) -> None:
    """Restore what :func:`random_states` returned."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])

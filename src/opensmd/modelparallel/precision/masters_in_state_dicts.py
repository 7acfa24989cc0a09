"""Where an optimizer's state dict keeps FP32 master weights and the loss scale; pure.

A master is an entry of its parameter's state, so it is gathered, merged and cut with the rest, and plain
PyTorch's optimizers ignore it. The loss scale is next to ``state`` and ``param_groups``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["MASTER", "SCALE", "split_masters"]

MASTER = "master_weight"
SCALE = "loss_scale"


def split_masters(state_dict: Mapping[str, Any]) -> tuple[dict[int, Tensor], dict[str, Any]]:
    """Split a full state dict into the masters by number and what an optimizer without them would have.

    A parameter whose state was only its master has no state then: its optimizer has not stepped yet.
    """
    masters: dict[int, Tensor] = {}
    rest: dict[Any, Any] = {}
    for number, entries in state_dict["state"].items():
        if isinstance(entries, Mapping) and MASTER in entries:
            masters[number] = entries[MASTER]
            entries = {key: value for key, value in entries.items() if key != MASTER}
            if not entries:
                continue
        rest[number] = entries
    return masters, {key: value for key, value in state_dict.items() if key != SCALE} | {"state": rest}

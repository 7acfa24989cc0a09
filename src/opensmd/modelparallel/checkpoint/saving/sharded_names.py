"""What scripts look up in files of a partial checkpoint with sharded parameters, by the original's names.

    model_*.pt        ``module``: the state dict
    optimizer_*.pt    ``fp32_flat_groups``: the parameters of each group in FP32, in one row
                      ``partition_count``: of how many files their parts are, 1 because they are whole

Loading leaves them out; they are in the files for those who read these without the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.precision.masters_in_state_dicts import MASTER
from opensmd.modelparallel.ranks.gathered import newly_gathered
from opensmd.modelparallel.state_dicts.merge import COUNT, FLAT, MODULE, marked

__all__ = ["with_flat_groups", "with_module"]


def with_module(model: dict[str, Any]) -> dict[str, Any]:
    """A model's state dict that has itself under the name that scripts read."""
    model[MODULE] = marked(model)
    return model


def with_flat_groups(
    optimizer: Mapping[str, Any], model: Mapping[str, Any], names: list[str]
) -> dict[str, Any]:
    """An optimizer's state dict with flat FP32 parameters.

    Args:
        model: this stage's state dict.
        names: of the parameters, by number.
    """

    def value(number: int) -> Tensor | None:
        master = optimizer["state"].get(number, {}).get(MASTER)
        found: Tensor | None = model.get(names[number]) if master is None else master
        return found

    flat = []
    for group in optimizer["param_groups"]:
        own = [each for each in map(value, group["params"]) if each is not None]
        rows = [each.detach().reshape(-1).float() for each in own]
        flat.append(newly_gathered(torch.cat(rows) if rows else torch.empty(0)))
    return {**optimizer, FLAT: flat, COUNT: 1}

"""The original's names for what scripts look up in partial checkpoints with sharded parameters.

    model_*.pt        ``module``: the state dict
    optimizer_*.pt    ``fp32_flat_groups``: the parameters of one group after the other in FP32, each in a
                      row; scripts put the rows together
                      ``partition_count``: of how many files their parts are, 1 because they are whole

Loading ignores them; they are for scripts that read the files without the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opensmd.modelparallel.precision.masters_in_state_dicts import MASTER
from opensmd.modelparallel.ranks.spread import InPieces, Spread
from opensmd.modelparallel.state_dicts.merge import COUNT, FLAT, MODULE, marked

__all__ = ["with_flat_groups", "with_module"]


def with_module(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model's state dict that also contains itself under the name that scripts read."""
    model[MODULE] = marked(model)
    return model


def with_flat_groups(
    optimizer: Mapping[str, Any], model: Mapping[str, Any], names: list[str], pieces: InPieces
) -> dict[str, Any]:
    """Return an optimizer's state dict with flat FP32 parameters.

    Args:
        model: this stage's state dict.
        names: parameter names by number.
        pieces: where tensors in pieces come from.
    """

    def value(number: int) -> Any:
        master = optimizer["state"].get(number, {}).get(MASTER)
        return model.get(names[number]) if master is None else master

    def flat(value: Any) -> Any:
        return pieces.flat_float(value) if isinstance(value, Spread) else value.detach().reshape(-1).float()

    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    rows = [flat(each) for each in map(value, numbers) if each is not None]
    return {**optimizer, FLAT: rows, COUNT: 1}

"""Checking that all ranks have built the same model, before each keeps its part."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn

from opensmd.modelparallel._torch_internals import gathered_vectors
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.sendable import control_device
from opensmd.modelparallel.runtime.stable_hash import stable_hash

__all__ = ["require_same_model"]

Entry = tuple[str, str, str]


def require_same_model(module: nn.Module, group: dist.ProcessGroup, *, sliced: Collection[str]) -> None:
    """Compare names, shapes and dtypes of parameters over ``group``.

    Args:
        sliced: the names of those whose shapes may differ.

    Raises:
        SMPError: on all ranks, naming the first parameter that differs.
    """
    mine = [
        (name, "sliced" if name in sliced else str(tuple(parameter.shape)), str(parameter.dtype))
        for name, parameter in module.named_parameters()
    ]
    # One number each; names travel only if they differ, for the error.
    own = torch.tensor([stable_hash(tuple(mine), 63)], device=control_device(group))
    hashes = gathered_vectors(own, group)
    if bool((hashes == hashes[0]).all()):
        return
    models = exchange(mine, group)
    other = next(rank for rank, model in enumerate(models) if model != models[0])
    # None makes a model that merely has more parameters differ somewhere.
    pairs = zip([*models[0], None], [*models[other], None], strict=False)
    first, second = next((a, b) for a, b in pairs if a != b)
    ranks = dist.get_process_group_ranks(group)
    raise SMPError(
        f"the ranks have different models: rank {ranks[0]} has {_named(first)} where rank {ranks[other]} has "
        f"{_named(second)}. Build the same model on all ranks"
    )


def _named(entry: Entry | None) -> str:
    return "no further parameter" if entry is None else " ".join(entry)

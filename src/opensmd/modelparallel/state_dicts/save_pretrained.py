"""Refusing Hugging Face's ``save_pretrained`` where this rank has only a part of the model.

It saves what ``module.state_dict()`` returns, unless it is given a state dict. Gathering here instead would
make all ranks wait that follow the usual habit of saving on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.tensors.placeholder import RemoteTensor
from opensmd.modelparallel.state import state

__all__ = ["require_whole"]


def require_whole(module: nn.Module, *args: Any, state_dict: Any = None, **_: Any) -> None:
    """Refuse to save a module of which this rank has a part, unless a state dict is given.

    Args:
        args, state_dict: what ``save_pretrained`` is given.

    Raises:
        SMPUnsupportedError: other ranks have the rest.
    """
    if any(isinstance(each, Mapping) for each in (*args, state_dict)) or not _is_part(module):
        return
    raise SMPUnsupportedError(
        "model.module.save_pretrained would save what is on this rank, which is a part of the model. Call "
        "weights = model.state_dict() on all ranks, and save_pretrained(..., state_dict=weights) on one of "
        "them"
    )


def _is_part(module: nn.Module) -> bool:
    if state.model is not None and state.model.shards:
        return True
    elsewhere = (
        (DTensor, RemoteTensor) if state.initialized and state.cfg.shards_parameters else (RemoteTensor,)
    )
    return any(isinstance(parameter, elsewhere) for parameter in module.parameters())

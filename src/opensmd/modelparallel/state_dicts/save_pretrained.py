"""Refusing Hugging Face's ``save_pretrained`` where this rank has only a part of the model.

It saves what ``module.state_dict()`` returns, unless it is given a state dict. Gathering here instead would
make all ranks wait that follow the usual habit of saving on one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.tensors.placeholder import RemoteTensor
from opensmd.modelparallel.state import state

__all__ = ["guard_save_pretrained"]


def guard_save_pretrained(module: nn.Module) -> None:
    """Let ``save_pretrained`` of a module's class, if it has one, refuse to save a part of the split model.

    It then raises SMPUnsupportedError, unless it is given a state dict. Other modules of the class save as
    before.
    """
    cls: Any = type(module)
    original = getattr(cls, "save_pretrained", None)
    if original is None or hasattr(original, "_smp_guarded"):
        return

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = (*args, kwargs.get("state_dict"))
        if not any(isinstance(argument, Mapping) for argument in arguments) and _is_part(self):
            raise SMPUnsupportedError(
                "save_pretrained would save what is on this rank, which is a part of the model. Call "
                "weights = model.state_dict() on all ranks, and save_pretrained(..., state_dict=weights) on "
                "one of them"
            )
        return original(self, *args, **kwargs)

    save_pretrained._smp_guarded = True  # type: ignore[attr-defined]
    cls.save_pretrained = save_pretrained


def _is_part(module: nn.Module) -> bool:
    if state.model is None or module != state.model.get_module():
        return False
    if state.model.shards:
        return True
    elsewhere = (DTensor, RemoteTensor) if state.cfg.shards_parameters else (RemoteTensor,)
    return any(isinstance(parameter, elsewhere) for parameter in module.parameters())

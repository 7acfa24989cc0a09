"""A model of the zoo: how to make it, its data, its loss, and how to load and checkpoint it."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MICROBATCHES", "ROWS", "Model", "loss_of", "seeded"]

MICROBATCHES = 4
ROWS = 8

_State = Mapping[str, Tensor]


def _mapped(module: nn.Module) -> nn.Module:
    """The module with the weights of a mapped safetensors file; weights of several names stay one."""
    from safetensors.torch import load_file, save_file

    state = module.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        own = {name: value for name, value in state.items() if _alone(name, value, state)}
        save_file({name: value.contiguous() for name, value in own.items()}, path)
        loaded = OrderedDict(load_file(path))
        loaded._metadata = state._metadata  # type: ignore[attr-defined]  # versions, which some ask for
        module.load_state_dict(loaded, strict=False, assign=True)
    return module


def _alone(name: str, tensor: Tensor, state: _State) -> bool:
    memory = tensor.untyped_storage().data_ptr()
    others = (value for other, value in state.items() if other != name)
    return tensor.numel() > 0 and all(one.untyped_storage().data_ptr() != memory for one in others)


def _not_checkpointed(module: nn.Module) -> None:
    """Nothing, for models that have no switch for it."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """How a zoo's model is trained.

    Attributes:
        build: makes it; called with the random generators seeded.
        batch: the keyword arguments of its forward in a step; tensors have the batch first.
        load: makes it anew with weights of a safetensors file.
        checkpoint: switches activation checkpointing on, if the model has a switch.
        loss: the loss of what it returns.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    load: Callable[[nn.Module], nn.Module] = _mapped
    checkpoint: Callable[[nn.Module], None] = _not_checkpointed


def seeded(model: Model, *, load: bool, checkpoint: bool) -> nn.Module:
    """The model with its first weights, the same at every call and on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        module = model.build()
        for part in module.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.p = 0.0
        if load:
            module = model.load(module)
        if checkpoint:
            model.checkpoint(module)
    return module


def loss_of(out: Any) -> Tensor:
    """The model's own loss, or else the mean squares of everything that it returns."""
    loss = getattr(out, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    terms = [tensor.float().square().mean() for tensor in _tensors(out)]
    total: Tensor = sum(terms[1:], terms[0])
    return total


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() and out.requires_grad else []
    values = out.values() if isinstance(out, dict) else out if isinstance(out, list | tuple) else ()
    return [tensor for value in values for tensor in _tensors(value)]

"""Copying a replica's state from another's memory: optimizers, scalers and the script's own objects.

Parameters and buffers are not sent here, because the reducer's first broadcast brings them. The rest goes
from the first rank of each stage to those of the new replicas, one parameter at a time, as when a plan
changes.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from opensmd.modelparallel._torch_internals import without_interception
from opensmd.modelparallel.checkpoint.saving.random_states import random_states, set_random_states
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.replan.moving import keep_training_state, training_state
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.gather import unite
from opensmd.modelparallel.wrapped import WrappedScaler
from opensmd.optim.param_groups import group_settings

__all__ = ["LoopPosition", "send_state"]


@dataclass
class LoopPosition:
    """The position in the loop over steps.

    Attributes:
        index: the number of completed steps.
    """

    index: int = 0


def send_state(objects: Mapping[str, Any], position: LoopPosition, *, receives: bool) -> None:
    """Make new replicas equal to the first of their group; all ranks must call.

    Args:
        objects: the script's, with ``state_dict`` and ``load_state_dict``; alike on all replicas.
        position: the position in the loop.
        receives: whether this replica is new.

    Raises:
        SMPError: a new replica's optimizers, scalers or objects differ from the others'.
    """
    group = state.groups[CommGroup.DP_GROUP]
    gc.collect()  # frees optimizers and scalers that only some ranks may still have
    announced: list[Any] = [_described(objects, position) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(announced, group=group, group_src=0)
    if receives:
        _require_alike(announced[0], objects)
    _send_tensors(group, receives=receives)
    if receives:
        _take(announced[0], objects, position)


def _described(objects: Mapping[str, Any], position: LoopPosition) -> dict[str, Any]:
    """Describe everything except what belongs to parameters."""
    model = state.model
    module = None if model is None else model.get_module()
    return {
        "optimizers": [
            list(map(group_settings, optimizer.param_groups)) for optimizer in state.optimizers.values()
        ],
        "scalers": [_scale(scaler) for scaler in state.scalers.values()],
        "objects": {name: value.state_dict() for name, value in objects.items()},
        "modes": [] if module is None else [submodule.training for submodule in module.modules()],
        "index": position.index,
        "seed": torch.initial_seed(),
        "random": random_states(),
    }


def _scale(scaler: WrappedScaler) -> dict[str, Any] | None:
    return scaler.state_dict() if hasattr(scaler, "state_dict") else None


def _require_alike(first: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    model = state.model
    module = None if model is None else model.get_module()
    own = {
        "optimizers": len(state.optimizers),
        "gradient scalers": len(state.scalers),
        "objects of elastic_steps": sorted(objects),
        "modules": 0 if module is None else len(list(module.modules())),
    }
    others = {
        "optimizers": len(first["optimizers"]),
        "gradient scalers": len(first["scalers"]),
        "objects of elastic_steps": sorted(first["objects"]),
        "modules": len(first["modes"]),
    }
    for what, number in own.items():
        if number != others[what]:
            raise SMPError(
                f"this replica cannot join: it has {number} {what}, and the others have {others[what]}. All "
                "run the same script, and make everything before the loop over smp.elastic_steps"
            )


def _send_tensors(group: dist.ProcessGroup, *, receives: bool) -> None:
    """Send gradients and optimizer state of this stage's parameters."""
    model = state.model
    if model is None or not model.partitioned:
        return
    first, optimizers = dist.get_rank(group) == 0, list(state.optimizers.values())
    with without_interception(), torch.no_grad():
        for name, parameter in model.get_module().named_parameters():
            if model.is_local(name):
                own = dict(training_state(parameter, optimizers)) if first else {}
                received = unite(own, group=group)
                if receives:
                    keep_training_state(parameter, received, optimizers)


def _take(first: Mapping[str, Any], objects: Mapping[str, Any], position: LoopPosition) -> None:
    model = state.model
    for optimizer, settings in zip(state.optimizers.values(), first["optimizers"], strict=True):
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)
    for scaler, scale in zip(state.scalers.values(), first["scalers"], strict=True):
        if scale is not None:
            scaler.load_state_dict(scale)  # type: ignore[attr-defined]
    if model is not None:
        for module, mode in zip(model.get_module().modules(), first["modes"], strict=True):
            module.training = mode
    for name, saved in first["objects"].items():
        objects[name].load_state_dict(saved)
    position.index = first["index"]
    # Replicas that draw the same numbers, such as those that divide one batch, continue to do so.
    if torch.initial_seed() == first["seed"]:
        set_random_states(first["random"])

"""Switching a running model to another plan: its parts move between two steps, with all training state.

Parameters and buffers are broadcast one by one, and each rank keeps its own. So no rank needs memory for more
than one of them at a time beyond what it keeps.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensmd.modelparallel._torch_internals import without_interception
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.ranks.composite import is_composite
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.replicas.reducer import Replicas
from opensmd.modelparallel.runtime.engine import Engine
from opensmd.modelparallel.runtime.tensors.before_writing import before_writing
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.gather import unite
from opensmd.modelparallel.state_dicts.laid_out import laid_out_as
from opensmd.modelparallel.state_dicts.model_state import ModelState

__all__ = ["keep_training_state", "replan", "training_state"]

logger = logging.getLogger("opensmd.modelparallel")

_DATA, _GRADIENT = "data", "gradient"


def replan(model: ModelState, engine: Engine, plan: Plan) -> bool:
    """Switch a model to another plan; between steps, on all ranks.

    Returns:
        Whether parts have moved, so that the model needs new replicas; if they cannot, the log says why.
    """
    gc.collect()  # frees optimizers that only some ranks may still have
    before, module, group = engine.plan, model.get_module(), state.groups[CommGroup.PP_GROUP]
    replicas = engine.reducer if isinstance(engine.reducer, Replicas) else None
    if replicas is not None and replicas.backward_passes_per_step > 1:
        why: str | None = "gradients of several steps add up before replicas reduce them"
    else:
        why = _obstacle(module, before, group)
    if why is not None:
        if state.rank == 0:
            logger.warning("replan: the model stays as it is, because %s", why)
        return False
    if replicas is not None:
        replicas.close()
    before_writing()
    model.share_what_is_everywhere()
    _move_tensors(module, before, plan, group)
    engine.follow(module, plan)
    model.follow_plan(plan)
    state.follow_plan()
    return True


def _obstacle(module: nn.Module, plan: Plan, group: dist.ProcessGroup) -> str | None:
    """Return why the parts of a model cannot move, as a clause; the same on all ranks of ``group``."""
    if not state.optimizers:
        return "the script has no smp.DistributedOptimizer, and state of other optimizers cannot be moved"
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return "the model has DTensors"
    if any(is_composite(parameter) for parameter in parameters.values()):
        return "the model has parameters made of other tensors, such as quantized ones"
    names = exchange([name for name, _ in module.named_buffers()], group)
    if any(others != names[0] for others in names):
        return "modules have got buffers in their forward, which the other ranks do not have"
    for shared in plan.shared:
        if len({id(parameters[name]) for name in shared.names if name in parameters}) > 1:
            return f"the parameters {' and '.join(shared.names)} are two tensors in the same memory"
    return None


def _move_tensors(module: nn.Module, before: Plan, after: Plan, group: dist.ProcessGroup) -> None:
    """Send what lives elsewhere according to ``after``; all ranks of ``group``, the pipeline's, must call.

    What has left keeps its memory until the engine follows the new plan.
    """
    me = dist.get_rank(group)
    optimizers = list(state.optimizers.values())
    with without_interception(), torch.no_grad():
        for name, parameter in module.named_parameters():
            source, target = before.parameter_home(name), after.parameter_home(name)
            if source == target:
                continue
            own = dict(_of_parameter(parameter, optimizers)) if me == source else {}
            received = unite(own, group=group)
            if me == target:
                _keep(parameter, received, optimizers)
        _move_buffers(module, before, after, group)


def _of_parameter(
    parameter: nn.Parameter, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[tuple[int, Any], Any]]:
    """Return all that must move with a parameter, by optimizer number and state key."""
    yield (-1, _DATA), parameter
    yield from training_state(parameter, optimizers)


def training_state(
    parameter: nn.Parameter, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[tuple[int, Any], Any]]:
    """Describe all that belongs to a parameter except its data: its gradient and optimizer state."""
    if parameter.grad is not None:
        yield (-1, _GRADIENT), parameter.grad
    for number, optimizer in enumerate(optimizers):
        for key, value in optimizer.state.get(parameter, {}).items():
            yield (number, key), value


def _keep(
    parameter: nn.Parameter,
    received: Mapping[tuple[int, Any], Any],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    parameter.__class__ = nn.Parameter
    parameter.data = laid_out_as(parameter, received[-1, _DATA])
    keep_training_state(parameter, received, optimizers)


def keep_training_state(
    parameter: nn.Parameter,
    received: Mapping[tuple[int, Any], Any],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Give a parameter what :func:`training_state` described on another rank."""
    if (-1, _GRADIENT) in received:
        parameter.grad = laid_out_as(parameter, received[-1, _GRADIENT])
    for (number, key), value in received.items():
        if number >= 0:
            is_like = isinstance(value, Tensor) and not is_composite(value) and value.shape == parameter.shape
            optimizers[number].state[parameter][key] = laid_out_as(parameter, value) if is_like else value


def _move_buffers(module: nn.Module, before: Plan, after: Plan, group: dist.ProcessGroup) -> None:
    """Move buffers with their modules; those of modules that are now split go to all ranks."""
    was_split, is_split = before.split(), after.split()
    me = dist.get_rank(group)
    for name, buffer in module.named_buffers():
        owner, _, own = name.rpartition(".")
        source, target = before.homes[owner], after.homes[owner]
        if owner in was_split or (source == target and owner not in is_split):
            continue
        received = unite({name: buffer} if me == source else {}, group=group)[name]
        if me != source and (me == target or owner in is_split):
            if received.shape == buffer.shape and received.dtype == buffer.dtype:
                buffer.copy_(received)
            else:
                module.get_submodule(owner)._buffers[own] = received

"""Creating what averages a model's gradients, over different ranks for each kind of parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.replicas.reducer import Replicas
from opensmd.modelparallel.replicas.together import ReplicasTogether, refuse_common_hook
from opensmd.modelparallel.replicas.trained_alike import TrainedAlike
from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder
from opensmd.modelparallel.sharding.sharded_parameters import ShardedParameters
from opensmd.modelparallel.sharding.sharded_replicas import ShardedReplicas, refuse_comm_hook
from opensmd.modelparallel.sharding.trained_slices import is_cut
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState

__all__ = ["make_replicas"]


def make_replicas(
    model: ModelState, sharded: ShardedParameters | None, options: Mapping[str, Any]
) -> Replicas | ReplicasTogether:
    """Return the replicas of a placed model; all ranks must call.

    Distributed modules have replicas on fewer ranks than others; sharded parameters are reduced separately.

    Args:
        sharded: the parameters that are split over ranks.
        options: those of :class:`Replicas`.

    Raises:
        SMPError: not all ranks train the same parameters.
        SMPUnsupportedError: comm hooks for sharded parameters, or for distributed modules with replicas.
    """
    if sharded is not None and options["comm_hooks"]:
        refuse_comm_hook()
    groups = state.groups
    named = list(model.get_module().named_parameters(remove_duplicate=False))
    cut = {name for name, parameter in named if sharded is not None and is_cut(parameter)}

    def of(kind: CommGroup, *, scaled: bool, alike: TrainedAlike | None = None) -> Replicas:
        def is_local(name: str) -> bool:
            mine = model.is_here(name) and name not in cut
            return mine and model.works_on_scaled_batch(name) == scaled

        return Replicas(
            model.get_module(),
            is_local=is_local,
            group=groups[kind],
            alike=alike,
            has_data=_is_real,
            **options,
        )

    distributed = model.has_scaled_batch
    slices_have_replicas = distributed and groups[CommGroup.RDP_GROUP].size() > 1
    if slices_have_replicas and options["comm_hooks"]:
        refuse_common_hook()
    TrainedAlike(named, groups[CommGroup.WORLD]).compare()  # before anything is sent from the first replica
    # Also of what is sliced or cut: each rank trains its own part.
    here = [(name, parameter) for name, parameter in named if model.is_here(name)]
    tensor_parallel = groups[CommGroup.TP_GROUP].size() > 1
    all_here = TrainedAlike(here, groups[CommGroup.DP_GROUP], at_once=tensor_parallel)
    members = [of(CommGroup.DP_GROUP, scaled=False, alike=all_here)]
    if slices_have_replicas:
        members.append(of(CommGroup.RDP_GROUP, scaled=True))
    if sharded is not None:
        return ShardedReplicas(
            sharded,
            members,
            groups[CommGroup.RDP_GROUP],
            split=groups.size(CommGroup.PP_GROUP) > 1,
            find_unused_parameters=options["find_unused_parameters"],
        )
    return ReplicasTogether(members) if distributed else members[0]


def _is_real(buffer: Tensor) -> bool:
    return not isinstance(buffer, Placeholder)

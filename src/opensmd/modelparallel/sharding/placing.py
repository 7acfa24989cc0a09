"""What ``smp.DistributedModel`` shards and over which ranks, given settings, plan and rank grid."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.sharding.sharded_parameters import (
    Limits,
    ShardedParameters,
    made_equal,
    shard_model,
    shard_stage,
)
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState

__all__ = ["shard_at_wrapping", "shard_parameters"]


def shard_at_wrapping() -> bool:
    """Whether parameters are cut when a model is wrapped, because it needs no partitions."""
    return state.cfg.shards_parameters and state.cfg.pipeline_parallel_degree == 1


def shard_parameters(model: ModelState, plan: Plan) -> ShardedParameters:
    """Give this rank its part of every parameter on its stage; all ranks must call.

    With distributed modules, only their parameters are cut, over the ranks with the same slices.
    """
    module, cfg = model.get_module(), state.cfg
    stage = state.groups.rank_in(CommGroup.PP_GROUP)
    split = cfg.pipeline_parallel_degree > 1
    here = {name for name, _ in module.named_parameters() if plan.parameter_home(name) == stage}
    distributed = {name for name, _ in module.named_parameters() if model.works_on_scaled_batch(name)}
    if not split:  # at wrapping, before there are inputs to follow
        model.follow_cuda()
    names = here & distributed if cfg.tensor_parallel_degree > 1 else here
    mesh = state.sharding_mesh = _mesh(
        next((parameter.device.type for parameter in module.parameters()), "cpu")
    )
    if split:
        model.delayed.fill_some(
            [parameter for name, parameter in module.named_parameters() if plan.parameter_home(name) == stage]
        )
        model.delayed.fill(lambda _: False)
        _make_equal(model, [parameter for name, parameter in module.named_parameters() if name in names])
        modules = dict(module.named_modules(remove_duplicate=False))
        local = [modules[name] for name, home in plan.atomic().items() if home == stage]
        return shard_stage(module, names, mesh, local)

    def prepare(parameters: list[nn.Parameter]) -> None:
        model.delayed.fill_some(parameters)
        sharded = {id(parameter) for name, parameter in module.named_parameters() if name in names}
        _make_equal(model, [parameter for parameter in parameters if id(parameter) in sharded])

    limits = Limits(
        least=cfg.sdp_param_persistence_threshold,
        most=cfg.sdp_reduce_bucket_size,
        live=cfg.sdp_max_live_parameters,
    )
    return shard_model(module, names, mesh, limits, prepare)


def _make_equal(model: ModelState, parameters: list[nn.Parameter]) -> None:
    """Give parameters that are about to be cut the values of the first of the ranks that share them."""
    names = {id(parameter): name for name, parameter in model.get_module().named_parameters()}
    common = [parameter for parameter in parameters if model.is_common_part(names[id(parameter)])]
    made_equal(common, state.groups[CommGroup.TP_GROUP])
    made_equal(parameters, state.groups[CommGroup.RDP_GROUP])


def _mesh(device: str) -> DeviceMesh:
    """Return the mesh of ranks that split parameters; copies of these groups are a second dimension."""
    degree, replicas = state.cfg.sharded_data_parallel_degree, state.groups[CommGroup.RDP_GROUP]
    if degree == dist.get_world_size(replicas):
        return DeviceMesh.from_group(replicas, device)
    groups = state.groups
    groups.split_replicas(degree)
    members = groups.members(CommGroup.RDP_GROUP)
    rows = [list(members[first : first + degree]) for first in range(0, len(members), degree)]
    assert groups.copies is not None
    return DeviceMesh.from_group(
        [groups.copies, groups.shards], device, mesh=rows, mesh_dim_names=("replicate", "shard")
    )

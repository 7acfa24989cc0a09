"""A model in parts without the engine: what lives elsewhere loses its data, as after placing."""

from __future__ import annotations

from torch import nn

from opensmd.modelparallel.init import init, shutdown
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.runtime.tensors.placeholder import make_remote
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState

__all__ = ["make_plan", "restart", "split"]


def restart(**settings: object) -> None:
    """``smp.init`` with other settings than the test before."""
    shutdown()
    init(settings)


def make_plan(module: nn.Module, stages: int) -> Plan:
    """Leaf modules spread over the stages in order; everything around them on stage 0."""
    leaves = [name for name, submodule in module.named_modules() if not list(submodule.children())]
    places = {name: index * stages // len(leaves) for index, name in enumerate(leaves)}
    homes = {name: places.get(name, 0) for name, _ in module.named_modules(remove_duplicate=False)}
    owners: dict[int, int] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        homes[owner] = owners.setdefault(id(parameter), homes[owner])
    return Plan(stages=stages, homes=homes)


def split(model: ModelState) -> None:
    """Do what the first step does to a model: free remote tensors, then tell the model."""
    plan = make_plan(model.module, state.cfg.pipeline_parallel_degree)
    me = state.groups.rank_in(CommGroup.PP_GROUP)
    for name, parameter in model.module.named_parameters():
        if plan.parameter_home(name) != me:
            make_remote(parameter)
    state.model = model
    model.finish_partition(plan)

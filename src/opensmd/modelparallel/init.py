"""``smp.init``: read the settings, meet the other ranks, create the groups."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from opensmd.collectives.backend import register
from opensmd.collectives.locality import meet
from opensmd.collectives.sealed import seal_objects_of_torch
from opensmd.collectives.stores.replica_store import JobPlace
from opensmd.environment.variables import fill
from opensmd.modelparallel.dry_run.automatic import choose_settings
from opensmd.modelparallel.elastic.elastic_job import ElasticJob
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.grid import CommGroup, RankGrid
from opensmd.modelparallel.ranks.groups import Groups, default_group
from opensmd.modelparallel.ranks.host_grid import HostGrid
from opensmd.modelparallel.runtime import tensor_memory
from opensmd.modelparallel.settings.config import Config
from opensmd.modelparallel.settings.elastic import Elastic
from opensmd.modelparallel.settings.sources import load_config
from opensmd.modelparallel.state import state
from opensmd.script_level import script_level

__all__ = ["init", "shutdown"]

logger = logging.getLogger("opensmd.modelparallel")

BACKEND = "smddp"


def init(config: Mapping[str, Any] | None = None, **settings: Any) -> None:
    """Start model parallelism; the first call of a script, on every rank.

    Settings come from ``config``; those of the launcher (``SM_HP_MP_PARAMETERS``, ``--mp_parameters``) take
    precedence. torch's default process group is used if there is one; otherwise it is created from what
    torchrun, smdrun, MPI or Slurm provide, or as a group of one. A second call with the same settings, or
    with none (importing transformers makes one), does nothing. One with more settings adds them, as long as
    no model is wrapped.

    With ``auto``, the first rank chooses the settings that are not given, for all ranks.

    Raises:
        TypeError: ``config`` is not a dict, or settings were given by keyword.
        ValueError: unknown, bad or contradictory settings, a number of ranks that does not fit them, or a
            LOCAL_RANK that does not fit the hosts on which the ranks met.
        SMPError: a second call that changes a setting, or that comes after ``smp.DistributedModel``.
    """
    if settings:
        raise TypeError(f"smp.init takes its settings in a dict, not by keyword: smp.init({settings})")
    if state.initialized and not config:
        return
    cfg = load_config(config)
    if state.initialized:
        # what ``auto`` has chosen adds to what was given
        if cfg != state.cfg and not _given(cfg).items() <= _given(state.cfg).items():
            _add_settings(cfg)
        return
    seal_objects_of_torch()
    tensor_memory.keep()
    if cfg.elastic is not None and _begin_elastic(cfg, cfg.elastic):
        return
    if dist.is_initialized():
        _enter_world(cfg, owns_world=False)
        return
    _join_world()
    try:
        _enter_world(cfg, owns_world=True)
    except BaseException:
        dist.destroy_process_group()  # nobody else would: a further call would take it for the script's
        raise
    atexit.register(_shut_down_at_exit, os.getpid())


def _enter_world(cfg: Config, *, owns_world: bool) -> None:
    """Find this rank's place in torch's default group, and make the other groups."""
    size, rank = dist.get_world_size(), dist.get_rank()
    locality = meet()
    _require_same_settings(cfg, size)
    layers: tuple[str, ...] = ()
    if cfg.auto is not None:
        cfg, layers = choose_settings(cfg, cfg.auto, default_group())
    grid = _grid(cfg, size)
    if rank == 0 and len(set(locality.hosts)) > 1:
        logger.info("%s", HostGrid(grid, locality.hosts).in_words())
    groups = Groups(grid, rank)
    state.fill(cfg=cfg, grid=grid, groups=groups, rank=rank, locality=locality, owns_world=owns_world)
    state.checkpointed_layers = layers


def _require_same_settings(cfg: Config, size: int) -> None:
    """Compare the ranks, which would otherwise make different groups, and wait for each other.

    Raises:
        SMPError: on all of them, naming a setting that differs.
    """
    everyone = exchange(cfg.model_dump(exclude={"ddp_port"}))
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                raise SMPError(
                    f"the ranks have given smp.init different settings: {name}={value!r} on rank 0, and "
                    f"{name}={other[name]!r} on rank {rank}. Give the same on all ranks"
                )


def shutdown() -> None:
    """End model parallelism, on every rank; ``smp.init`` may follow with other settings."""
    if not state.initialized:
        return
    if state.elastic is not None:
        state.elastic.end()
    with contextlib.ExitStack() as undoing:  # all of it, whatever raises
        undoing.callback(_leave_world)
        for undo in state.undoing:
            undoing.callback(undo)


def _shut_down_at_exit(pid: int) -> None:
    """End model parallelism with the process that began it, and not with a fork of it."""
    if os.getpid() == pid:
        shutdown()


def _leave_world() -> None:
    try:
        if state.engine is not None:
            state.engine.close()
        if dist.is_initialized() and state.groups[CommGroup.WORLD] is dist.group.WORLD:
            state.groups.destroy()
            if state.owns_world:
                dist.destroy_process_group()
    finally:
        state.clear()


def _begin_elastic(cfg: Config, elastic: Elastic) -> bool:
    """If this process belongs to an elastic job, create its groups; return whether it does."""
    place = JobPlace.from_environment(os.environ)
    if place is None:
        warnings.warn(
            "the setting elastic has no effect: replicas come and go in jobs that smdrun has started with "
            "--elastic-replicas",
            stacklevel=script_level(),
        )
        return False
    if dist.is_initialized():
        raise SMPError(
            "with the setting elastic, smp.init makes torch's default process group, and makes it again "
            "whenever replicas come and go; leave out torch.distributed.init_process_group"
        )
    job = ElasticJob(cfg, elastic, place)
    job.begin()
    state.elastic = job
    atexit.register(_shut_down_at_exit, os.getpid())
    return True


def _add_settings(new: Config) -> None:
    """Add the settings of a second call, before any model, to those of the first."""
    old = state.cfg
    before, after = _given(old), _given(new)
    if (
        state.elastic is not None
        or state.model is not None
        or any(before[name] != after[name] for name in before.keys() & after.keys())
    ):
        raise SMPError(
            f"smp.init was called again with other settings: {_difference(old, new)}. Call it once; settings "
            "can only be added, and only before smp.DistributedModel"
        )
    cfg = load_config({**before, **after})
    grid, groups = _grid(cfg, state.grid.size), state.groups
    if grid != state.grid:
        groups.destroy()
        groups = Groups(grid, state.rank)
    state.refill(cfg=cfg, grid=grid, groups=groups)


def _given(cfg: Config) -> dict[str, Any]:
    """Return the settings that somebody gave, without the defaults."""
    return cfg.model_dump(include=cfg.model_fields_set)


def _join_world() -> None:
    register()
    fill()
    dist.init_process_group(BACKEND)


def _grid(cfg: Config, size: int) -> RankGrid:
    grid = RankGrid(
        size, cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, placement=cfg.placement_strategy
    )
    if grid.data > 1 and not cfg.ddp:
        partitions = cfg.pipeline_parallel_degree
        raise ValueError(
            f"{size} ranks make {grid.data} replicas of {_count(partitions, 'partition')}, but ddp is False, "
            "so nothing would keep the replicas equal. Set 'ddp': True for data parallelism over them, set "
            f"'partitions' to {size}, or start {_count(partitions, 'process', 'es')}"
        )
    degree = cfg.sharded_data_parallel_degree
    if cfg.shards_parameters and grid.data % degree:
        raise ValueError(
            f"sharded_data_parallel_degree={degree} does not divide the number of replicas, {grid.data} "
            f"({size} ranks of {_count(cfg.pipeline_parallel_degree, 'partition')}, tensor_parallel_degree="
            f"{cfg.tensor_parallel_degree}): parameters are shared out among that many replicas of a stage"
        )
    return grid


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"


def _difference(old: Config, new: Config) -> str:
    before, after = old.model_dump(), new.model_dump()
    return ", ".join(
        f"{name}={after[name]!r} (was {before[name]!r})" for name in before if before[name] != after[name]
    )

"""The setting ``auto``: the first rank chooses a strategy, and all ranks adopt its settings."""

from __future__ import annotations

import io
import logging
import os
from functools import partial
from typing import Any

import torch.distributed as dist
from rich.console import Console

from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.dry_run.factory import model_and_step
from opensmd.modelparallel.dry_run.module_tree import describe
from opensmd.modelparallel.dry_run.timing.stage_links import links_of_job
from opensmd.modelparallel.planning.derived_traces import layers_of
from opensmd.modelparallel.planning.strategy import Choices, Strategy, strategies
from opensmd.modelparallel.ranks.first_rank import from_first_rank
from opensmd.modelparallel.report.strategies import strategy_table
from opensmd.modelparallel.settings.config import Automatic, Config

__all__ = ["choose_settings"]

logger = logging.getLogger("opensmd.modelparallel")

SHOWN = 6


def choose_settings(cfg: Config, auto: Automatic, group: dist.ProcessGroup) -> tuple[Config, tuple[str, ...]]:
    """Return the settings, completed by the choice, and the layers to checkpoint; all ranks must call.

    Args:
        cfg: the explicit settings, which are kept.
        auto: its part about the choice.
        group: that of all ranks.

    Raises:
        ValueError: the model cannot be created, or no choice is possible.
        PeerFailed: that happened on the first rank.
    """
    settings, layers = from_first_rank(
        lambda: _chosen(cfg, auto, dist.get_world_size(group)),
        group,
        does="chooses a strategy",
        could_not="choose a strategy",
    )
    given = cfg.model_dump(include=cfg.model_fields_set)
    return Config(**{**settings, **given}), layers


def _chosen(cfg: Config, auto: Automatic, ranks: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    module, step = model_and_step(auto.model)
    trace = describe(module) if step is None else capture(module, step)
    limit = _share_of_memory() if auto.memory_gib is None else auto.memory_gib * (1 << 30)
    found = strategies(trace, _choices(cfg, auto, ranks, limit))[:SHOWN]
    _say(found, limit)
    return found[0].settings(), tuple(layers_of(trace)) if found[0].checkpointing else ()


def _choices(cfg: Config, auto: Automatic, ranks: int, memory: float) -> Choices:
    """Return what is left to choose, that is, not given by the script."""
    given = cfg.model_fields_set
    partitions = {cfg.pipeline_parallel_degree} if "pipeline_parallel_degree" in given else None
    if "ddp" in given and not cfg.ddp:
        partitions = {ranks}
    return Choices(
        ranks=ranks,
        batch=auto.batch,
        memory_bytes=memory,
        memory_weight=cfg.memory_weight if given & {"memory_weight", "optimize"} else 0.0,
        active_microbatches=cfg.active_microbatches if "active_microbatches" in given else None,
        partitions=partitions,
        microbatches={cfg.microbatches} if "microbatches" in given else None,
        pipelines={cfg.pipeline} if "pipeline" in given else None,
        links=partial(links_of_job, cfg),
    )


def _share_of_memory() -> float:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return whole / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _say(found: list[Strategy], limit: float) -> None:
    if logger.isEnabledFor(logging.INFO):
        out = io.StringIO()
        Console(file=out, width=110, force_terminal=False).print(strategy_table(found))
        logger.info("Strategy:\n%s", out.getvalue())
    if found[0].rank_bytes > limit:
        logger.warning(
            "auto: no strategy fits %.2f GiB per rank; the one that needs least was chosen, %.2f GiB",
            limit / (1 << 30),
            found[0].rank_bytes / (1 << 30),
        )

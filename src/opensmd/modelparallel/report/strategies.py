"""Strategies as a table and as JSON: the chosen one and the next best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from opensmd.modelparallel.planning.strategy import Strategy

__all__ = ["strategies_json", "strategy_table"]

_NUMBERS = (
    "partitions",
    "replicas",
    "pipeline",
    "microbatches",
    "active_microbatches",
    "checkpointing",
    "seconds",
    "bubble",
    "rank_bytes",
)


def strategy_table(strategies: Sequence[Strategy]) -> Table:
    """Return a table with a row per strategy, the chosen one first."""
    table = Table(title="Strategies, the chosen one first")
    headings = (
        "partitions",
        "replicas",
        "pipeline",
        "microbatches",
        "active",
        "checkpoints",
        "step",
        "bubble",
    )
    for heading in (*headings, "rank"):
        table.add_column(heading, justify="right")
    for strategy in strategies:
        table.add_row(
            str(strategy.partitions),
            str(strategy.replicas),
            strategy.pipeline if strategy.partitions > 1 else "",
            str(strategy.microbatches),
            str(strategy.active_microbatches) if strategy.partitions > 1 else "",
            "yes" if strategy.checkpointing else "",
            f"{strategy.seconds * 1e3:.2f} ms",
            f"{strategy.bubble:.1%}",
            f"{strategy.rank_bytes / (1 << 20):,.1f} MiB",
        )
    return table


def strategies_json(strategies: Sequence[Strategy]) -> str:
    """Return all numbers, and for the chosen one also the plan and the settings for ``smp.init``."""
    rows: list[dict[str, Any]] = [
        {name: getattr(strategy, name) for name in _NUMBERS} for strategy in strategies
    ]
    chosen = strategies[0]
    return json.dumps(
        {
            "chosen": rows[0],
            "settings": chosen.settings(),
            "next": rows[1:],
            "plan": asdict(chosen.plan),
        }
    )

"""The plan as a table, for the log of the first step and for ``smd plan``."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import asdict, astuple, fields

from rich.console import Console, Group, RenderableType
from rich.table import Table

from opensmd.modelparallel.planning.plan import Crossing, Plan, PlanRow
from opensmd.modelparallel.planning.predict import bubble
from opensmd.modelparallel.planning.rank_bytes import RankBytes, Sharing, bytes_of_rank

__all__ = ["plan_json", "plan_table", "print_plan", "rank_table"]

logger = logging.getLogger("opensmd.modelparallel")

HEADING = "Partition assignments:"


def print_plan(plan: Plan) -> None:
    """Log the plan at level INFO. Its first line is the original's."""
    if logger.isEnabledFor(logging.INFO):  # off by default, and drawing takes a while
        logger.info("%s\n%s", HEADING, render(plan))
    for note in plan.notes:
        logger.warning("%s", note)


def render(plan: Plan) -> str:
    """Return :func:`plan_table` as plain text."""
    out = io.StringIO()
    Console(file=out, width=110, force_terminal=False).print(plan_table(plan))
    return out.getvalue()


def plan_table(plan: Plan, *, microbatches: int | None = None) -> RenderableType:
    """Return modules and stages, and with ``microbatches`` the predicted bubble. Times are per microbatch."""
    parts: list[RenderableType] = [_modules(plan), _stages(plan)]
    parts.extend(
        f"{crossing.source} -> {crossing.target}: {_counted(crossing.tensors, 'tensor')}, "
        f"{_bytes(crossing.bytes)} in each microbatch's forward, as much in its backward where they "
        f"need gradients{_over(crossing)}"
        for crossing in plan.crossings
    )
    parts.extend(f"shared: {' = '.join(shared.names)} on stage {shared.home}" for shared in plan.shared)
    if microbatches is not None:
        parts.append(
            f"predicted bubble with {_counted(microbatches, 'microbatch')}: "
            f"{bubble(plan, microbatches):.1%} of a step"
        )
    return Group(*parts)


def plan_json(plan: Plan, sharing: Sharing, *, interpreter: int) -> str:
    """Return the plan as JSON; ``ranks`` are the bytes of :func:`rank_table`."""
    ranks = [bytes_of_rank(load, sharing) for load in plan.loads]
    sizes = [
        {**asdict(rank), "live": rank.total + interpreter, "resident": rank.resident(interpreter)}
        for rank in ranks
    ]
    return json.dumps({**asdict(plan), "ranks": sizes})


def rank_table(plan: Plan, sharing: Sharing, *, interpreter: int) -> Table:
    """Return the bytes of each stage's ranks by purpose; with ``interpreter``, also of the process."""
    table = Table(title="Memory of each rank")
    names = [field.name.replace("_", " ") for field in fields(RankBytes)]
    for name in ("stage", *names, "live", "resident"):
        table.add_column(name, justify="right")
    for stage, load in enumerate(plan.loads):
        rank = bytes_of_rank(load, sharing)
        sizes = (*astuple(rank), rank.total + interpreter, rank.resident(interpreter))
        table.add_row(str(stage), *map(_bytes, sizes))
    return table


def _modules(plan: Plan) -> Table:
    table = Table(title="Modules in the order of execution")
    table.add_column("module", overflow="fold")
    table.add_column("kind")
    for name in ("stage", "parameters", "memory", "activations", "time", "sends"):
        table.add_column(name, justify="right")
    for row in plan.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: PlanRow) -> tuple[str, ...]:
    return (
        row.module or "(root)",
        row.kind,
        str(row.stage),
        f"{row.parameters:,}",
        _bytes(row.parameter_bytes),
        _bytes(row.activation_bytes),
        f"{row.seconds * 1e3:.2f} ms",
        _bytes(row.crossing_bytes) if row.crossing_bytes else "",
    )


def _stages(plan: Plan) -> Table:
    table = Table(title="Stages")
    columns = ("parameters", "training state", "activations", "in flight", "kept late", "peak memory", "time")
    for name in ("stage", *columns):
        table.add_column(name, justify="right")
    for stage, load in enumerate(plan.loads):
        table.add_row(
            str(stage),
            _bytes(load.parameter_bytes),
            _bytes(load.training_bytes),
            _bytes(load.activation_bytes),
            str(load.in_flight),
            _bytes(load.waiting_bytes) if load.waiting_bytes else "",
            _bytes(load.memory_bytes),
            f"{load.seconds * 1e3:.2f} ms",
        )
    return table


def _over(crossing: Crossing) -> str:
    return f"; between hosts, {crossing.seconds * 1e3:.1f} ms each way" if crossing.between_hosts else ""


def _counted(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"

"""``smd plan``: what partitioning would do to a model, without starting any rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from torch import nn

if TYPE_CHECKING:
    from opensmd.modelparallel.planning.trace import ModelTrace

__all__ = ["plan"]

SHOWN = 6  # strategies


@click.command()
@click.argument("target", metavar="MODULE:FACTORY")
@click.option("--partitions", type=click.IntRange(1), default=2, show_default=True, help="Pipeline stages.")
@click.option("--microbatches", type=click.IntRange(1), default=1, show_default=True)
@click.option("--optimize", type=click.Choice(["memory", "speed"]), default="memory", show_default=True)
@click.option("--memory-weight", type=click.FloatRange(0, 1), help="Overrides --optimize (0.8 or 0.2).")
@click.option("--active-microbatches", type=click.IntRange(1), help="Default: partitions + 2.")
@click.option("--times", is_flag=True, help="Measure module times in a real run instead of estimating.")
@click.option(
    "--optimizer-bytes", default=2.0, show_default=True, help="Bytes of state per byte of parameters."
)
@click.option("--tensor", type=click.IntRange(1), default=1, show_default=True, help="Ranks of a stage.")
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Of the model.")
@click.option(
    "--sharded",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Replicas that share out parameters, gradients and the optimizer's state.",
)
@click.option("--shard-optimizer", is_flag=True, help="All replicas share out the optimizer's state.")
@click.option("--precision", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp32", show_default=True)
@click.option("--auto", "ranks", type=click.IntRange(1), metavar="RANKS", help="Choose how to use this many.")
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Samples, with --auto.")
@click.option("--memory", type=click.FloatRange(0), metavar="GIB", help="Of a rank, with --auto.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    target: str,
    *,
    partitions: int,
    microbatches: int,
    optimize: str,
    memory_weight: float | None,
    active_microbatches: int | None,
    times: bool,
    optimizer_bytes: float,
    tensor: int,
    replicas: int,
    sharded: int,
    shard_optimizer: bool,
    precision: str,
    ranks: int | None,
    batch: int,
    memory: float | None,
    as_json: bool,
) -> None:
    """Show the plan, the memory of each rank and the predicted bubble for a model.

    MODULE:FACTORY names a function without arguments. It returns (model, call), where call() runs forward and
    loss of one microbatch; or (model, inputs), where inputs are the positional arguments (a tuple) or keyword
    arguments (a dict) of the model's forward; or the model alone, which is then planned by the sizes of its
    parameters. Unless --times is given, nothing is computed, and a model on the meta device takes no memory:
    opensmd.tools.gpt_like has gpt_175b and gpt_1t.

    The last table shows what each rank keeps with --tensor, --replicas, --sharded and --precision; the model
    is given in FP32. Resident memory is the live memory and the interpreter's, taken from this process, and a
    sixteenth of the tensors, which is kept for the next step.

    With --auto, the factory's step is that of a whole batch of --batch samples. Partitions, replicas,
    schedule, microbatches and activation checkpoints are chosen for RANKS ranks with --memory each. The
    choice and the next best are shown, with what is predicted of them.
    """
    from opensmd.modelparallel.dry_run.capture import capture
    from opensmd.modelparallel.dry_run.module_tree import describe
    from opensmd.modelparallel.planning.partition import partition
    from opensmd.modelparallel.planning.rank_bytes import Sharing
    from opensmd.modelparallel.report.table import plan_json, plan_table, rank_table
    from opensmd.tools.interpreter_memory import interpreter_bytes

    try:
        sharing = Sharing(
            tensor=tensor,
            replicas=replicas,
            sharded=sharded,
            shard_optimizer=shard_optimizer,
            half=precision != "fp32",
            optimizer_bytes=optimizer_bytes,
        )
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--sharded") from error
    model, call = _load(target)
    trace = describe(model) if call is None else capture(model, call, times=times)
    if ranks is not None:
        _show_strategies(
            trace, ranks=ranks, batch=batch, memory=memory, optimizer_bytes=optimizer_bytes, as_json=as_json
        )
        return
    weight = memory_weight if memory_weight is not None else (0.2 if optimize == "speed" else 0.8)
    made = partition(
        trace,
        partitions,
        memory_weight=weight,
        microbatches=microbatches,
        active_microbatches=active_microbatches,
        optimizer_bytes=optimizer_bytes,
    )
    if as_json:
        click.echo(plan_json(made, sharing, interpreter=interpreter_bytes(model)))
    else:
        console = _console()
        console.print(plan_table(made, microbatches=microbatches))
        console.print(rank_table(made, sharing, interpreter=interpreter_bytes(model)))
        all_ranks = partitions * tensor * replicas
        console.print(f"{all_ranks} ranks: {partitions} partitions x {tensor} x {replicas} replicas")
    for note in made.notes:
        click.echo(note, err=True)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)  # a pipe or a file has no width of its own


def _load(target: str) -> tuple[nn.Module, Callable[[], Any] | None]:
    """Import and call the factory; return the model and its step, if there is one."""
    from opensmd.modelparallel.dry_run.factory import model_and_step

    try:
        return model_and_step(target)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="MODULE:FACTORY") from error


def _show_strategies(
    trace: ModelTrace, *, ranks: int, batch: int, memory: float | None, optimizer_bytes: float, as_json: bool
) -> None:
    from opensmd.modelparallel.planning.strategy import Choices, strategies
    from opensmd.modelparallel.report.strategies import strategies_json, strategy_table

    limit = math.inf if memory is None else memory * (1 << 30)
    choices = Choices(ranks=ranks, batch=batch, memory_bytes=limit, optimizer_bytes=optimizer_bytes)
    found = strategies(trace, choices)[:SHOWN]
    if as_json:
        click.echo(strategies_json(found))
    else:
        _console().print(strategy_table(found))
    if found[0].rank_bytes > limit:
        click.echo(f"none fits into {memory} GiB per rank: the first needs the least", err=True)

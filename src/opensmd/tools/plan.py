"""``smd plan``: what partitioning would do to a model, without starting any rank."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import nn

__all__ = ["plan"]


@click.command()
@click.argument("target", metavar="MODULE:FACTORY")
@click.option("--partitions", type=click.IntRange(1), default=2, show_default=True, help="Pipeline stages.")
@click.option("--microbatches", type=click.IntRange(1), default=1, show_default=True)
@click.option("--optimize", type=click.Choice(["memory", "speed"]), default="memory", show_default=True)
@click.option("--memory-weight", type=click.FloatRange(0, 1), help="Overrides --optimize (0.8 or 0.2).")
@click.option("--active-microbatches", type=click.IntRange(1), help="Default: partitions + 2.")
@click.option("--times", is_flag=True, help="Measure module times in a real run instead of estimating.")
@click.option("--optimizer-bytes", default=2.0, show_default=True, help="State bytes a parameter byte.")
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
    as_json: bool,
) -> None:
    """Show the plan, the memory of each rank and the predicted bubble for a model.

    MODULE:FACTORY names a function without arguments that returns the model and one microbatch's step: either
    (model, call), where call() runs forward and loss, or (model, inputs), where inputs are the positional
    arguments (a tuple) or keyword arguments (a dict) of the model's forward, or the model alone, which is
    then planned by its parameter sizes. Unless --times is given, nothing is computed, and a model on the meta
    device takes no memory: opensmd.tools.gpt_like has gpt_175b and gpt_1t.

    The last table has what a rank keeps with --tensor, --replicas, --sharded and --precision, of which the
    model is one of FP32.
    """
    from opensmd.modelparallel.dry_run.capture import capture, describe
    from opensmd.modelparallel.planning.partition import partition
    from opensmd.modelparallel.planning.rank_bytes import Sharing
    from opensmd.modelparallel.report.table import plan_table, rank_table

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
        click.echo(made.to_json())
    else:
        width = None if sys.stdout.isatty() else 120  # a pipe or a file has no width of its own
        console = Console(width=width)
        console.print(plan_table(made, microbatches=microbatches))
        console.print(rank_table(made, sharing))
        ranks = partitions * tensor * replicas
        console.print(f"{ranks} ranks: {partitions} partitions x {tensor} x {replicas} replicas")
    for note in made.notes:
        click.echo(note, err=True)


def _load(target: str) -> tuple[nn.Module, Callable[[], Any] | None]:
    """Import and call the factory; return the model and its step, if there is one."""
    module_name, colon, attribute = target.partition(":")
    if not colon or not attribute:
        raise click.BadParameter(f"{target!r} is not of the form module:factory", param_hint="MODULE:FACTORY")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise click.BadParameter(str(error), param_hint="MODULE:FACTORY") from error
    made = factory()
    if isinstance(made, nn.Module):
        return made, None
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise click.ClickException(
            f"{target} returned {type(made).__name__}; expected a model, (model, call) or (model, inputs)"
        )
    model, second = made
    if isinstance(second, dict):
        return model, lambda: model(**second)
    if isinstance(second, tuple | list):
        return model, lambda: model(*second)
    if isinstance(second, torch.Tensor):
        return model, lambda: model(second)
    if callable(second):
        return model, second
    raise click.ClickException(
        f"{target} returned a model and {type(second).__name__}; expected a function, inputs or a tensor"
    )

"""``smd plan``: what partitioning would do to a model, without starting any rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from torch import nn

if TYPE_CHECKING:
    from opensmd.modelparallel.planning.plan import Plan
    from opensmd.modelparallel.planning.rank_bytes import Sharing
    from opensmd.modelparallel.planning.trace import ModelTrace
    from opensmd.modelparallel.planning.units import Links

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
@click.option("--tensor", type=click.IntRange(1), default=1, show_default=True, help="Ranks per stage.")
@click.option(
    "--replicas", type=click.IntRange(1), default=1, show_default=True, help="Replicas of the model."
)
@click.option(
    "--sharded",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Replicas that share parameters, gradients and optimizer state.",
)
@click.option("--shard-optimizer", is_flag=True, help="Let all replicas share the optimizer state.")
@click.option("--hosts", type=click.IntRange(1), default=1, show_default=True, help="Hosts for the ranks.")
@click.option(
    "--link",
    type=click.FloatRange(0, min_open=True),
    metavar="GBIT",
    help="Speed of a host's link, with --hosts.",
)
@click.option("--precision", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp32", show_default=True)
@click.option(
    "--auto", "ranks", type=click.IntRange(1), metavar="RANKS", help="Choose how to use this many ranks."
)
@click.option(
    "--batch", type=click.IntRange(1), default=32, show_default=True, help="Samples per step, with --auto."
)
@click.option("--memory", type=click.FloatRange(0), metavar="GIB", help="Memory of a rank, with --auto.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(target: str, *, ranks: int | None, batch: int, memory: float | None, **options: Any) -> None:
    """Show the plan, the memory of each rank and the predicted bubble for a model.

    MODULE:FACTORY names a function without arguments. It returns (model, call), where call() runs forward and
    loss of one microbatch; or (model, inputs), where inputs are the positional arguments (a tuple) or keyword
    arguments (a dict) of the model's forward; or just the model, which is then planned by the sizes of its
    parameters. Without --times, nothing is computed, and a model on the meta device takes no memory:
    opensmd.tools.gpt_like has gpt_175b and gpt_1t.

    The last table shows what each rank keeps with --tensor, --replicas, --sharded and --precision; the model
    itself must be in FP32. Resident memory is the live memory, the interpreter's (taken from this process),
    and a sixteenth of the tensors, which is kept for the next step.

    With --hosts, ranks are placed in order, equally many on each host, and tensors between stages on
    different hosts go over links of --link Gbit/s (8 by default).

    With --auto, the factory's step must run a whole batch of --batch samples. Partitions, replicas, schedule,
    microbatches and activation checkpoints are chosen for RANKS ranks with --memory each. The choice and the
    next best are shown with their predictions.
    """
    wanted = _Wanted(**options)
    sharing = wanted.sharing()
    model, trace = _traced(target, times=wanted.times)
    if ranks is None:
        _show_plan(model, trace, wanted, sharing)
    else:
        _show_strategies(trace, wanted, ranks=ranks, batch=batch, memory=memory)


@dataclass(frozen=True)
class _Wanted:
    """The options of the command, except those of ``--auto``."""

    partitions: int
    microbatches: int
    optimize: str
    memory_weight: float | None
    active_microbatches: int | None
    times: bool
    optimizer_bytes: float
    tensor: int
    replicas: int
    sharded: int
    shard_optimizer: bool
    hosts: int
    link: float | None
    precision: str
    as_json: bool

    @property
    def weight(self) -> float:
        """The weight of memory relative to time."""
        if self.memory_weight is not None:
            return self.memory_weight
        return 0.2 if self.optimize == "speed" else 0.8

    @property
    def ranks(self) -> int:
        """The number of ranks in all replicas."""
        return self.partitions * self.tensor * self.replicas

    def links(self, ranks: int, partitions: int, tensor: int = 1) -> Links:
        """The links between the stages.

        Raises:
            click.BadParameter: the ranks cannot be divided among the hosts.
        """
        from opensmd.modelparallel.dry_run.timing.stage_links import stage_links
        from opensmd.modelparallel.ranks.grid import RankGrid
        from opensmd.modelparallel.ranks.host_grid import HostGrid

        if ranks % self.hosts:
            raise click.BadParameter(
                f"{ranks} ranks cannot be on {self.hosts} hosts, as many on each", param_hint="--hosts"
            )
        hosts = tuple(rank * self.hosts // ranks for rank in range(ranks))
        given = {} if self.link is None else {"link": self.link * 1e9 / 8}
        return stage_links(HostGrid(RankGrid(ranks, partitions, tensor), hosts), given)

    def sharing(self) -> Sharing:
        """What ranks share.

        Raises:
            click.BadParameter: the ranks cannot share it.
        """
        from opensmd.modelparallel.planning.rank_bytes import Sharing

        try:
            return Sharing(
                tensor=self.tensor,
                replicas=self.replicas,
                sharded=self.sharded,
                shard_optimizer=self.shard_optimizer,
                half=self.precision != "fp32",
                optimizer_bytes=self.optimizer_bytes,
            )
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--sharded") from error


def _traced(target: str, *, times: bool) -> tuple[nn.Module, ModelTrace]:
    """Return the factory's model, and what is known about it."""
    from opensmd.modelparallel.dry_run.capture import capture
    from opensmd.modelparallel.dry_run.module_tree import describe

    model, call = _load(target)
    return model, describe(model) if call is None else capture(model, call, times=times)


def _show_plan(model: nn.Module, trace: ModelTrace, wanted: _Wanted, sharing: Sharing) -> None:
    from opensmd.modelparallel.planning.partition import partition
    from opensmd.modelparallel.report.table import plan_json
    from opensmd.tools.interpreter_memory import interpreter_bytes

    plan = partition(
        trace,
        wanted.partitions,
        memory_weight=wanted.weight,
        microbatches=wanted.microbatches,
        active_microbatches=wanted.active_microbatches,
        optimizer_bytes=wanted.optimizer_bytes,
        links=wanted.links(wanted.ranks, wanted.partitions, wanted.tensor),
    )
    interpreter = interpreter_bytes(model)
    if wanted.as_json:
        click.echo(plan_json(plan, sharing, interpreter=interpreter))
    else:
        _print_tables(plan, wanted, sharing, interpreter)
    for note in plan.notes:
        click.echo(note, err=True)


def _print_tables(plan: Plan, wanted: _Wanted, sharing: Sharing, interpreter: int) -> None:
    from opensmd.modelparallel.report.table import plan_table, rank_table

    console = _console()
    console.print(plan_table(plan, microbatches=wanted.microbatches))
    console.print(rank_table(plan, sharing, interpreter=interpreter))
    partitions, tensor, replicas = wanted.partitions, wanted.tensor, wanted.replicas
    console.print(f"{wanted.ranks} ranks: {partitions} partitions x {tensor} x {replicas} replicas")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)  # pipes and files have no width


def _load(target: str) -> tuple[nn.Module, Callable[[], Any] | None]:
    """Import and call the factory; return the model and its step, if there is one."""
    from opensmd.modelparallel.dry_run.factory import model_and_step

    try:
        return model_and_step(target)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="MODULE:FACTORY") from error


def _show_strategies(
    trace: ModelTrace, wanted: _Wanted, *, ranks: int, batch: int, memory: float | None
) -> None:
    from opensmd.modelparallel.planning.strategy import Choices, strategies
    from opensmd.modelparallel.report.strategies import strategies_json, strategy_table

    limit = math.inf if memory is None else memory * (1 << 30)
    choices = Choices(
        ranks=ranks,
        batch=batch,
        memory_bytes=limit,
        optimizer_bytes=wanted.optimizer_bytes,
        links=partial(wanted.links, ranks),
    )
    shown = strategies(trace, choices)[:SHOWN]
    if wanted.as_json:
        click.echo(strategies_json(shown))
    else:
        _console().print(strategy_table(shown))
    if shown[0].rank_bytes > limit:
        click.echo(f"none fits into {memory} GiB per rank: the first needs the least", err=True)

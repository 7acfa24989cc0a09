"""The options that all benchmarks have, for the command and for the ranks that it starts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import launch, mpi
from benchmarks.harness.sampling import Plan

__all__ = ["command_parser", "each_mpi", "plan", "rank_arguments", "rank_parser"]


def command_parser(doc: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """A parser with the options of a command, ``seconds`` being its default for one case."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--seconds", type=float, default=seconds, help="for all candidates of one case")
    parser.add_argument("--rounds", type=int, default=5, help="at least so many of all candidates, a case")
    parser.add_argument(
        "--patience",
        type=float,
        default=30.0,
        help="seconds to wait, a case, for cores that are near and not shared",
    )
    parser.add_argument("--backends", nargs="+", default=["smddp", "gloo", "fake"])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for results and plots")
    return parser


def rank_parser() -> argparse.ArgumentParser:
    """A parser with what :func:`rank_arguments` passes on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--backends", nargs="+", required=True)
    return parser


def rank_arguments(options: argparse.Namespace) -> list[str]:
    """The shared options, for the ranks."""
    names = ("seconds", "rounds", "patience")
    shared = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    return [*shared, "--backends", *options.backends]


def plan(options: argparse.Namespace, *, untimed: int = 1) -> Plan:
    """How long the ranks measure, as the command was asked."""
    return Plan(options.seconds, min_rounds=options.rounds, untimed=untimed)


def each_mpi(options: argparse.Namespace, measure: Callable[[int, mpi.Mpi | None], None]) -> None:
    """``measure(ranks, mpi)`` for every number of ranks and every wanted MPI installed, or none."""
    for ranks in options.ranks:
        installed = mpi.available(ranks=ranks, cores=launch.cores())
        for chosen in [one for one in installed if one.name in options.mpi] or [None]:
            measure(ranks, chosen)

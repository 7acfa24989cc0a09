"""``smd plan comm``: how long gradients take between hosts that need not exist yet."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from opensmd.collectives.hosts.cost_model import ALGORITHMS, MIB, Cluster, Prediction, predict_buckets

__all__ = ["comm"]

HOSTS = (2, 4, 8, 16, 64, 256, 1000, 10_000)


@click.command()
@click.argument("target", metavar="[MODULE:FACTORY]", required=False)
@click.option("--gradients", type=click.FloatRange(0, min_open=True), metavar="MIB", help="Of float32.")
@click.option("--hosts", type=click.IntRange(1), multiple=True, help="May be repeated; default: 2 to 10000.")
@click.option("--ranks", type=click.IntRange(1), default=8, show_default=True, help="On each host.")
@click.option(
    "--link", default=10.0, show_default=True, metavar="GBIT", help="Of a host, per second, each way."
)
@click.option("--payload", default=0.95, show_default=True, help="Share of the link that is not headers.")
@click.option("--delay", default=20.0, show_default=True, metavar="US", help="Of a message, one way.")
@click.option("--memory", default=5.0, show_default=True, metavar="GB", help="Speed of all_reduce on a host.")
@click.option(
    "--sockets", default=2.0, show_default=True, metavar="GB", help="Speed at which a rank sends or receives."
)
@click.option(
    "--coding", default=2.0, show_default=True, metavar="GB", help="Speed at which a rank codes or decodes."
)
@click.option("--message", default=5.0, show_default=True, metavar="US", help="Time per message of a rank.")
@click.option("--bucket", default=25.0, show_default=True, metavar="MIB", help="DDP's bucket_cap_mb.")
@click.option("--json", "as_json", is_flag=True, help="Print the predictions as JSON.")
def comm(
    target: str | None,
    *,
    gradients: float | None,
    hosts: tuple[int, ...],
    ranks: int,
    link: float,
    payload: float,
    delay: float,
    memory: float,
    sockets: float,
    coding: float,
    message: float,
    bucket: float,
    as_json: bool,
) -> None:
    """Predict how long the gradients of one backward pass take between hosts.

    Give their size with --gradients, or a model with MODULE:FACTORY, as for `smd plan`. The prediction
    compares a ring of all ranks (Gloo's), reduce and broadcast over a tree of hosts, smddp's algorithm, and
    the same with compression between hosts. Nothing runs; docs/algorithms.md lists the assumptions.

    Speeds are decimal: --memory 5 is 5e9 bytes per second. Measure it on a host with `smd bench`: the bytes
    of a large all_reduce divided by its time.
    """
    nbytes = _gradient_bytes(target, gradients)
    try:
        clusters = [
            Cluster(
                hosts=count,
                ranks=ranks,
                link=link * 1e9 / 8 * payload,
                delay=delay * 1e-6,
                memory=memory * 1e9,
                sockets=sockets * 1e9,
                coding=coding * 1e9,
                message=message * 1e-6,
            )
            for count in hosts or HOSTS
        ]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if not bucket > 0:
        raise click.BadParameter("must be positive", param_hint="--bucket")
    predictions = {
        cluster.hosts: {name: predict_buckets(name, cluster, nbytes, bucket * MIB) for name in ALGORITHMS}
        for cluster in clusters
    }
    if as_json:
        rows = [
            {**asdict(cluster), "all_reduce": _as_json(predictions[cluster.hosts])} for cluster in clusters
        ]
        click.echo(json.dumps({"gradient_bytes": nbytes, "clusters": rows}, indent=2))
        return
    title = f"{nbytes / MIB:,.1f} MiB of gradients, {ranks} ranks a host, {link:g} Gbit/s"
    Console(width=None if sys.stdout.isatty() else 120).print(_table(title, predictions))


def _gradient_bytes(target: str | None, mebibytes: float | None) -> float:
    if (target is None) == (mebibytes is None):
        raise click.UsageError("give either MODULE:FACTORY or --gradients")
    if mebibytes is not None:
        return mebibytes * MIB
    from opensmd.modelparallel.dry_run.factory import model_and_step

    try:
        model, _ = model_and_step(str(target))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="MODULE:FACTORY") from error
    return 4.0 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _as_json(predictions: dict[str, Prediction]) -> dict[str, dict[str, float]]:
    return {name: asdict(prediction) for name, prediction in predictions.items()}


def _table(title: str, by_hosts: dict[int, dict[str, Prediction]]) -> Table:
    table = Table(title=title, caption="the fastest that loses nothing is marked *")
    table.add_column("hosts", justify="right")
    for name in ALGORITHMS:
        table.add_column(name, justify="right")
    for hosts, predictions in by_hosts.items():
        best = min(
            (name for name in predictions if "," not in name), key=lambda name: predictions[name].seconds
        )
        cells = [_time(prediction.seconds) + "*" * (name == best) for name, prediction in predictions.items()]
        table.add_row(str(hosts), *cells)
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"

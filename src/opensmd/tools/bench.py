"""``smd bench``: starts ranks that measure all_reduce of smddp against Gloo in turns, and print a table."""

from __future__ import annotations

import click

from opensmd.launch.run import Options, run

__all__ = ["bench"]

SIZES = "4,1024,65536,1048576,16777216"


@click.command()
@click.option("-n", "--ranks", type=click.IntRange(min=2), default=2, show_default=True)
@click.option("--bytes", "sizes", default=SIZES, show_default=True, help="Message sizes in bytes.")
@click.option("--seconds", type=float, default=1.0, show_default=True, help="Time for each size and backend.")
def bench(ranks: int, sizes: str, seconds: float) -> None:
    """Measure all_reduce (float32, sum) of smddp against Gloo on this machine.

    Medians of single calls on rank 0, the two backends taking turns in the same run. A quick look; the
    numbers in docs/benchmarks.md come from benchmarks/.
    """
    if not all(size.isdecimal() and int(size) >= 4 for size in sizes.split(",")):
        raise click.UsageError(f"--bytes {sizes!r}: expected numbers of at least 4, separated by commas")
    options = Options(
        script="opensmd.tools.bench_rank",
        args=[sizes, str(seconds)],
        ranks=ranks,
        module=True,
        prefix=False,
    )
    raise SystemExit(run(options))

"""``smd bench``: starts ranks that measure collectives of smddp and Gloo in turns, and print a table."""

from __future__ import annotations

import json

import click

from opensmd.launch.leftovers.guardian import job_folder
from opensmd.launch.options import Options
from opensmd.launch.run import run

__all__ = ["COLLECTIVES", "bench"]

SIZES = "4,1024,65536,1048576,16777216"
# the names in bench_operations.OPERATIONS, without loading torch
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
)


@click.command()
@click.argument("collectives", nargs=-1, metavar="[COLLECTIVE]...")
@click.option("-n", "--ranks", type=click.IntRange(min=2), default=2, show_default=True)
@click.option("--bytes", "sizes", default=SIZES, show_default=True, help="Message sizes in bytes.")
@click.option("--seconds", type=float, default=1.0, show_default=True, help="Time for each size and backend.")
@click.option("--json", "as_json", is_flag=True, help="Print the results for programs.")
def bench(collectives: tuple[str, ...], ranks: int, sizes: str, seconds: float, as_json: bool) -> None:
    """Compare COLLECTIVEs (default: all_reduce; "all" for all of them) of smddp and Gloo on this machine.

    Times are medians of single calls on rank 0 with float32; the two backends take turns in the same run. Bus
    bandwidth is counted as in nccl-tests. Every case is checked first; the exit status is 1 if a result is
    wrong. This is for a quick look; the numbers in docs/benchmarks.md come from benchmarks/.
    """
    names = COLLECTIVES if "all" in collectives else collectives or ("all_reduce",)
    unknown = [name for name in names if name not in COLLECTIVES]
    if unknown:
        raise click.UsageError(
            f"there is no collective {unknown[0]!r}, only {', '.join(COLLECTIVES)} and all"
        )
    if not all(size.isdecimal() and int(size) >= 4 for size in sizes.split(",")):
        raise click.UsageError(f"--bytes {sizes!r}: expected numbers of at least 4, separated by commas")
    work = {"collectives": names, "sizes": [*map(int, sizes.split(","))], "seconds": seconds, "json": as_json}
    options = Options(
        script="opensmd.tools.bench_rank", args=[json.dumps(work)], ranks=ranks, module=True, prefix=False
    )
    with job_folder() as folder:
        status = run(options, folder)
    raise SystemExit(status)

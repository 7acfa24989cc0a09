"""``python -m benchmarks.hosts.step``: a step of DDP between hosts beside what it cannot be shorter than.

Computing leaves the cores free, as a device of its own would: layers wait. So a step could take as long as
the computing, or as its gradients need on the cable, whichever is longer; but DDP has none before the
forward has ended.
"""

from __future__ import annotations

import argparse

from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.results import Results, human_bytes, human_time, row
from benchmarks.harness.table import Grid
from benchmarks.hosts.__main__ import USUAL_MEGABITS, place
from benchmarks.hosts.networks import networks
from benchmarks.hosts.step_rank import ALONE, OF_FORWARD

CABLE = "the cable"
BACKENDS = ("smddp", "gloo")


def main() -> None:
    """Measure steps that compute for these shares of the time that their gradients need on the cable."""
    parser = command_parser(__doc__, seconds=2.0)
    parser.set_defaults(backends=list(BACKENDS), rounds=3, patience=0.0)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 1], help="ranks on each")
    parser.add_argument("--mebibytes", type=int, default=32, help="of gradients")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--bucket", type=float, default=1.0, help="MiB, DDP's bucket_cap_mb")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 1.0, 2.0])
    parser.add_argument("--megabits", type=float, default=USUAL_MEGABITS, help="of a cable, a second and way")
    options = parser.parse_args()
    results = measure(options)
    grid(results).print()
    results.save(options.out / f"hosts-step-{'-'.join(map(str, options.hosts))}.json")


def measure(options: argparse.Namespace) -> Results:
    """What the ranks found, and the time that the cable takes."""
    hosts, nbytes = len(options.hosts), options.mebibytes << 20
    on_cable = 2 * (hosts - 1) / hosts * nbytes * 8 / options.megabits * 1e-6
    args = [*rank_arguments(options), "--bytes", str(nbytes), "--layers", str(options.layers)]
    args += [
        "--bucket",
        str(options.bucket),
        "--computing",
        *(str(share * on_cable) for share in options.shares),
    ]
    with networks(hosts, options.megabits) as names:
        places = [place(name) for name, ranks in zip(names, options.hosts, strict=True) for _ in range(ranks)]
        results = launch.run(
            "benchmarks.hosts.step_rank", ranks=len(places), mpi=None, args=args, places=places
        )
    results.layout += (
        f", {'+'.join(map(str, options.hosts))} on {hosts} hosts, buckets of {options.bucket:g} MiB"
    )
    results.notes["network"] = f"{options.megabits:g} Mbit/s each way"
    results.rows += [row(case, size, CABLE, [on_cable * 1e6]) for case, size in results.cases()]
    return results


def grid(results: Results) -> Grid:
    """A line a step: its parts alone, with either backend, and how much longer than the longer part."""
    lines = []
    for case, nbytes in results.cases():
        found = {name: results.p50(case, nbytes, name) or 0.0 for name in (ALONE, CABLE, *BACKENDS)}
        longer = max(found[ALONE], found[CABLE])
        least = found[ALONE] * OF_FORWARD + max(found[ALONE] * (1 - OF_FORWARD), found[CABLE])
        times = [human_time(time) for time in found.values()]
        shares = [f"{found[name] / bound - 1:+.0%}" for bound in (longer, least) for name in BACKENDS]
        lines.append([case, human_bytes(nbytes), *times, *shares])
    bounds = ("the longer of both", "forward and the longer of backward and cable")
    beyond = [f"{name} beyond {bound}" for bound in bounds for name in BACKENDS]
    headings = ["a step", "gradients", ALONE, CABLE, "over smddp", "over gloo", *beyond]
    return Grid(f"{results.claim}, {results.layout}", headings, lines, left=2)


if __name__ == "__main__":
    main()

"""``python -m benchmarks.hosts``: make hosts of namespaces, start ranks in all, print the table."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.results import Results, human_bytes, human_time, row
from benchmarks.harness.table import Grid
from benchmarks.hosts.networks import CABLE, networks
from benchmarks.hosts.operations import OPERATIONS, least_bytes
from benchmarks.hosts.rank import CROSSED
from benchmarks.hosts.ways import EXACT
from opensmd.environment.settings import COMPRESSIONS

SIZES = [4, 64 << 10, 1 << 20, 4 << 20]
USUAL_MEGABITS = 1000.0
LEAST = "least that must cross"
NETWORK = "network's own time"
BUSIEST = "smddp's bytes over the busiest link"


def main() -> None:
    """Measure with as many ranks on each host as were asked for."""
    parser = command_parser(__doc__, seconds=2.0)
    parser.set_defaults(backends=["smddp", "gloo"], rounds=3)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 2], help="ranks on each")
    parser.add_argument("--operations", nargs="+", default=[each.name for each in OPERATIONS])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--megabits", type=float, default=USUAL_MEGABITS, help="of a cable, a second and way")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds from one host to another")
    parser.add_argument("--compressed", action="store_true", help="all_reduce in fewer bytes, too")
    options = parser.parse_args()
    if options.compressed:
        options.operations, options.dtype = [EXACT.name], "float32"
    results = measure(options, options.megabits, COMPRESSIONS if options.compressed else ())
    layout = "+".join(map(str, options.hosts))
    results.layout += f", {layout} on {len(options.hosts)} hosts, {options.dtype}"
    results.notes["network"] = f"{options.megabits:g} Mbit/s each way"
    if options.delay:
        results.notes["network"] += f", {options.delay:g} ms from host to host"
    add_network(results, options.hosts, options.megabits)
    if options.compressed:
        results.claim = "compressed"
        compressed_grid(results).print()
        results.save(options.out / f"compressed-{layout.replace('+', '-')}-{options.megabits:g}.json")
        return
    grid(results).print()
    results.save(options.out / f"hosts-{layout.replace('+', '-')}-{options.dtype}{_conditions(options)}.json")


def _conditions(options: argparse.Namespace) -> str:
    """In a file's name, those that are not the usual ones."""
    speed = "" if options.megabits == USUAL_MEGABITS else f"-{options.megabits:g}"
    return speed + (f"-{options.delay:g}ms" if options.delay else "")


def measure(options: argparse.Namespace, megabits: float | None, ways: Sequence[str]) -> Results:
    """Let ranks measure on hosts whose cables carry so much; all_reduce in these ``ways``, too."""
    args = [*rank_arguments(options), "--sizes", *map(str, options.sizes)]
    args += ["--operations", *options.operations, "--dtype", options.dtype, "--ways", *ways]
    try:
        with networks(len(options.hosts), megabits, options.delay * 1e-3) as names:
            places = [
                place(name) for name, ranks in zip(names, options.hosts, strict=True) for _ in range(ranks)
            ]
            return launch.run("benchmarks.hosts.rank", ranks=len(places), mpi=None, args=args, places=places)
    except PermissionError as error:
        sys.exit(str(error))


def place(network: str) -> launch.Place:
    """Where the ranks of one host run."""
    env = {"GLOO_SOCKET_IFNAME": CABLE, "OPENSMD_HOST_ID": network}
    return launch.Place(("ip", "netns", "exec", network), env)


def add_network(results: Results, hosts: list[int], megabits: float) -> None:
    """The bytes that must cross the busiest link, and their time there, as two more candidates."""
    operations = {each.name: each for each in OPERATIONS}
    for case, nbytes in results.cases():
        least = least_bytes(operations[case], nbytes, hosts)
        results.rows.append(row(case, nbytes, LEAST, [least]))
        results.rows.append(row(case, nbytes, NETWORK, [least * 8 / megabits]))


def grid(results: Results) -> Grid:
    """A line an operation and size: times, what crossed the busiest link, and both ratios.

    Without Gloo's, where it took no part.
    """
    lines = []
    beside_gloo = any(each.candidate == "gloo" for each in results.rows)
    for case, nbytes in results.cases():
        found = {
            each.candidate: each.p50 for each in results.rows if (each.case, each.bytes) == (case, nbytes)
        }
        crossed = human_bytes(int(found[f"smddp: {CROSSED}"]))
        limit = f"{found[NETWORK] / found['smddp']:.0%}"
        least, ours = human_bytes(int(found[LEAST])), human_time(found["smddp"])
        line = [case, human_bytes(nbytes), ours, crossed, least, limit]
        if beside_gloo:
            gloos, ratio = (
                human_bytes(int(found[f"gloo: {CROSSED}"])),
                f"{found['gloo'] / found['smddp']:.2f}x",
            )
            line = [*line[:3], human_time(found["gloo"]), crossed, gloos, least, ratio, limit]
        lines.append(line)
    headings = ["operation", "size", "smddp", BUSIEST, LEAST, "of the network's limit"]
    if beside_gloo:
        headings = [*headings[:3], "gloo", BUSIEST, "gloo's", LEAST, "gloo / smddp", headings[-1]]
    return Grid(f"{results.claim}, {results.layout}", headings, lines, left=2)


def compressed_grid(results: Results) -> Grid:
    """A line a size: the time of each compression, and what it gains over the exact sum."""
    names = ["smddp", *(f"smddp: {way}" for way in COMPRESSIONS)]
    lines = []
    for case, nbytes in results.cases():
        found = {name: results.p50(case, nbytes, name) or math.nan for name in names}
        crossed = [
            results.p50(case, nbytes, f"{name}: {CROSSED}") or math.nan for name in (names[0], names[-1])
        ]
        lines.append(
            [
                human_bytes(nbytes),
                *(human_time(found[name]) for name in names),
                *(human_bytes(int(count)) for count in crossed),
                *(f"{found['smddp'] / found[name]:.2f}x" for name in names[1:]),
            ]
        )
    gains = [f"exact / {way}" for way in COMPRESSIONS]
    crossing = ["exact: bytes over the busiest link", "int8: bytes"]
    headings = ["all_reduce of", "exact", *COMPRESSIONS, *crossing, *gains]
    return Grid(f"{results.claim}, {results.layout}", headings, lines, left=1)


if __name__ == "__main__":
    main()

"""``python -m benchmarks.hosts``: make hosts of namespaces, start ranks in all, print the table."""

from __future__ import annotations

import sys

from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.results import Results, human_bytes, human_time, row
from benchmarks.harness.table import Grid
from benchmarks.hosts.networks import CABLE, networks
from benchmarks.hosts.operations import OPERATIONS, least_bytes
from benchmarks.hosts.rank import CROSSED

SIZES = [4, 64 << 10, 1 << 20, 4 << 20]
LEAST = "least that must cross"
NETWORK = "network's own time"


def main() -> None:
    """Measure with as many ranks on each host as were asked for."""
    parser = command_parser(__doc__, seconds=2.0)
    parser.set_defaults(backends=["smddp", "gloo"], rounds=3)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 2], help="ranks on each")
    parser.add_argument("--operations", nargs="+", default=[each.name for each in OPERATIONS])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--megabits", type=float, default=1000.0, help="of a cable, a second and way")
    options = parser.parse_args()
    args = [*rank_arguments(options), "--sizes", *map(str, options.sizes)]
    args += ["--operations", *options.operations, "--dtype", options.dtype]
    try:
        with networks(len(options.hosts), options.megabits) as names:
            places = [
                place(name) for name, ranks in zip(names, options.hosts, strict=True) for _ in range(ranks)
            ]
            results = launch.run(
                "benchmarks.hosts.rank", ranks=len(places), mpi=None, args=args, places=places
            )
    except PermissionError as error:
        sys.exit(str(error))
    layout = "+".join(map(str, options.hosts))
    results.layout += f", {layout} on {len(options.hosts)} hosts, {options.dtype}"
    results.notes["network"] = f"{options.megabits:g} Mbit/s each way"
    add_network(results, options.hosts, options.megabits)
    grid(results).print()
    results.save(options.out / f"hosts-{layout.replace('+', '-')}-{options.dtype}.json")


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
    """A line an operation and size: times, what crossed the busiest link, and both ratios."""
    lines = []
    for case, nbytes in results.cases():
        found = {
            each.candidate: each.p50 for each in results.rows if (each.case, each.bytes) == (case, nbytes)
        }
        lines.append(
            [
                case,
                human_bytes(nbytes),
                human_time(found["smddp"]),
                human_time(found["gloo"]),
                human_bytes(int(found[f"smddp: {CROSSED}"])),
                human_bytes(int(found[f"gloo: {CROSSED}"])),
                human_bytes(int(found[LEAST])),
                f"{found['gloo'] / found['smddp']:.2f}x",
                f"{found[NETWORK] / found['smddp']:.0%}",
            ]
        )
    crossing = ["smddp's bytes over the busiest link", "gloo's", "least that must cross"]
    headings = ["operation", "size", "smddp", "gloo", *crossing, "gloo / smddp", "of the network's limit"]
    return Grid(f"{results.claim}, {results.layout}", headings, lines, left=2)


if __name__ == "__main__":
    main()

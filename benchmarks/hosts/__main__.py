"""``python -m benchmarks.hosts``: make two hosts of namespaces, start ranks in both, print the table."""

from __future__ import annotations

import sys

from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.results import Results, row
from benchmarks.harness.table import Ratio, print_table
from benchmarks.hosts.networks import CABLE, two_networks

SIZES = [4, 64 << 10, 1 << 20, 8 << 20, 64 << 20]
HOSTS = 2
NETWORK = "network's own time"
RATIOS = [
    Ratio("gloo / smddp", "smddp", ["gloo"]),
    Ratio("network / smddp", "smddp", [NETWORK]),
]


def main() -> None:
    """Measure with as many ranks on each of two hosts as were asked for."""
    parser = command_parser(__doc__, seconds=20.0)
    parser.set_defaults(backends=["smddp", "gloo"])
    parser.add_argument("--ranks", type=int, default=4, help="half of them on each host")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, multiples of 4")
    parser.add_argument("--megabits", type=float, default=1000.0, help="of the cable, a second and way")
    options = parser.parse_args()
    args = [*rank_arguments(options), "--sizes", *map(str, options.sizes)]
    try:
        with two_networks(options.megabits) as networks:
            places = [place(networks[rank * HOSTS // options.ranks]) for rank in range(options.ranks)]
            results = launch.run(
                "benchmarks.hosts.rank", ranks=options.ranks, mpi=None, args=args, places=places
            )
    except PermissionError as error:
        sys.exit(str(error))
    results.notes["network"] = f"{options.megabits:g} Mbit/s each way"
    add_network(results, options.megabits)
    print_table(results, RATIOS)
    results.save(options.out / f"hosts-{options.ranks}.json")


def place(network: str) -> launch.Place:
    """Where the ranks of one host run."""
    env = {"GLOO_SOCKET_IFNAME": CABLE, "OPENSMD_HOST_ID": network}
    return launch.Place(("ip", "netns", "exec", network), env)


def add_network(results: Results, megabits: float) -> None:
    """The time in which what a host must send and receive goes over the cable, as one more candidate."""
    for case, nbytes in results.cases():
        leaving = 2 * nbytes * (HOSTS - 1) / HOSTS
        results.rows.append(row(case, nbytes, NETWORK, [leaving * 8 / megabits]))


if __name__ == "__main__":
    main()

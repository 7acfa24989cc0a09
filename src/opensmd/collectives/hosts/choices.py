"""From which sizes on collectives between hosts go another way, by the model of costs. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from opensmd.collectives.hosts.cost_model import (
    MIB,
    Cluster,
    carried,
    in_parts,
    most_carried,
    predict,
)

__all__ = ["NEVER", "Thresholds", "in_words", "thresholds"]

LEAST_CARRIED = 8 << 10  # which hardly takes longer than an empty message
LARGEST = 256 * MIB
NEVER = 1 << 62


@dataclass(frozen=True)
class Thresholds:
    """Sizes in bytes.

    Attributes:
        carried: up to here, what one host sends another goes with the comparison of calls.
        tree_from: from here on, an all_reduce is a reduce and a broadcast over a tree of hosts.
    """

    carried: int
    tree_from: int


def thresholds(cluster: Cluster, *, usual: Cluster) -> Thresholds:
    """Those of a group whose network and hosts are like this.

    Args:
        cluster: as it was found, for choices between ways whose results have the same bits.
        usual: the same, but for what was measured, which is different whenever a job starts: over a tree
            numbers are added up in another order, and a job must have the results that it had before.
    """
    return Thresholds(_carried(cluster), _tree_from(usual))


def _carried(cluster: Cluster) -> int:
    most = most_carried(cluster.hosts)
    size = LEAST_CARRIED
    while size < most and carried(cluster, 2 * size).seconds <= in_parts(cluster, 2 * size).seconds:
        size *= 2
    return min(size, most)


def _tree_from(cluster: Cluster) -> int:
    found, size = NEVER, LARGEST
    while size >= MIB and predict("tree", cluster, size).seconds < predict("levels", cluster, size).seconds:
        found, size = size, size // 2
    return found


def in_words(cluster: Cluster, chosen: Thresholds, measured: list[str]) -> str:
    """The parameters, how they came about, and what follows from them."""
    units = {
        "link": (8e-9, "Gbit/s"),
        "delay": (1e6, "us"),
        "memory": (1e-9, "GB/s"),
        "sockets": (1e-9, "GB/s"),
        "message": (1e6, "us"),
    }
    values = asdict(cluster)
    speeds = ", ".join(
        f"{name} {values[name] * scale:.3g} {unit}{' (measured)' * (name in measured)}"
        for name, (scale, unit) in units.items()
    )
    tree = "no size" if chosen.tree_from == NEVER else f"{chosen.tree_from / MIB:g} MiB"
    return (
        f"{cluster.hosts} hosts of {cluster.ranks} ranks; {speeds}; up to {chosen.carried / 1024:g} KiB to "
        f"another host go with the comparison of calls; all_reduce takes a tree of hosts from {tree} on"
    )

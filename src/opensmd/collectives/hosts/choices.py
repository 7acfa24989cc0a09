"""The sizes from which on collectives between hosts use another algorithm, by the cost model; pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from opensmd.collectives.hosts.cost_model import (
    LEAST_OF_RING,
    LEAST_OF_TURN,
    MIB,
    Cluster,
    Prediction,
    all_at_once,
    carried,
    doubled,
    in_parts,
    in_ring,
    in_turns,
    least_part,
    may_take_turns,
    most_carried,
    predict,
)

__all__ = ["NEVER", "Thresholds", "in_words", "thresholds"]

LEAST_CARRIED = 8 << 10  # hardly takes longer than an empty message
LEAST_OF_PIECE, MOST_OF_PIECE = 32 << 10, 256 << 10
MANY = 40  # times the cost of sending and receiving a message
LARGEST = 256 * MIB
FINER = 2 ** (1 / 16)  # steps finer than powers of two
NEVER = 1 << 62


@dataclass(frozen=True)
class Thresholds:
    """Sizes in bytes.

    Attributes:
        carried: up to this size, what one host sends another travels with the comparison of calls.
        ring_from: from this size on, an all_reduce uses a ring of hosts, instead of sending from each to all
            others at once, if cuts are large enough.
        turns_from: likewise, each host sends to one other at a time, in an all_reduce that cannot use a ring.
        least_part: the smallest part of an all_reduce in which each host sends to all others at once.
        piece: what a rank sends another in an all_to_all is cut into pieces of this size.
        tree_from: from this size on, an all_reduce is a reduce and a broadcast over a tree of hosts.
    """

    carried: int
    ring_from: int
    turns_from: int
    least_part: int
    piece: int
    tree_from: int


def thresholds(cluster: Cluster, *, usual: Cluster) -> Thresholds:
    """Return the thresholds for a group with such a network and hosts.

    Args:
        cluster: as measured, for choices between algorithms whose results have the same bits.
        usual: the same without measured values, which differ whenever a job starts: a tree adds up in another
            order, and a job must reproduce its results.
    """
    ring_from = _faster_from(in_ring, LEAST_OF_RING, cluster)
    turns_from = _faster_from(in_turns, LEAST_OF_TURN, cluster)
    parts = least_part(cluster), _piece(cluster)
    return Thresholds(_carried(cluster), ring_from, turns_from, *parts, _tree_from(usual))


def _carried(cluster: Cluster) -> int:
    most = most_carried(cluster.hosts)
    size = LEAST_CARRIED
    while size < most and carried(cluster, 2 * size).seconds <= in_parts(cluster, 2 * size).seconds:
        size *= 2
    return min(size, most)


def _faster_from(way: Callable[[Cluster, float], Prediction], least: int, cluster: Cluster) -> int:
    """Return the size from which on sending to one other host at a time is faster than to all at once.

    Args:
        way: the algorithm, with cuts of at least ``least`` bytes.
    """

    def pays(size: float) -> bool:
        return may_take_turns(cluster, size, least) and (
            way(cluster, size).seconds <= all_at_once(cluster, size).seconds
        )

    return _smallest(pays, FINER)


def _piece(cluster: Cluster) -> int:
    """Return the size of pieces, which keep many senders in step; otherwise links idle at the end.

    Every piece costs messages, so it must occupy a link much longer than a core, and as long as the delay. If
    pieces would be too large, links are not the bottleneck.
    """
    size = doubled(LEAST_OF_PIECE, cluster.link * max(MANY * 2 * cluster.message, cluster.delay))
    return size if cluster.hosts > 2 and size <= MOST_OF_PIECE else NEVER


def _tree_from(cluster: Cluster) -> int:
    def pays(size: float) -> bool:
        tree, levels = predict("tree", cluster, size), predict("levels", cluster, size)
        return size >= MIB and tree.seconds < levels.seconds

    return _smallest(pays, 2.0)


def _smallest(pays: Callable[[float], bool], step: float) -> int:
    """Return the smallest size from which on an algorithm pays, searched downwards from the largest."""
    smallest, size = NEVER, float(LARGEST)
    while pays(size):
        smallest, size = int(size), size / step
    return smallest


def in_words(cluster: Cluster, chosen: Thresholds, measured: list[str]) -> str:
    """Describe the parameters, their origin, and what follows from them."""
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
    ring, turns = (
        "no size" if size == NEVER else f"{size / 1024:.0f} KiB"
        for size in (chosen.ring_from, chosen.turns_from)
    )
    tree = "no size" if chosen.tree_from == NEVER else f"{chosen.tree_from / MIB:g} MiB"
    pieces = "whole" if chosen.piece == NEVER else f"in pieces of up to {chosen.piece / 1024:g} KiB"
    return (
        f"{cluster.hosts} hosts of {cluster.ranks} ranks; {speeds}; up to {chosen.carried / 1024:g} KiB to "
        f"another host go with the comparison of calls; all_reduce goes along a ring of hosts from {ring} "
        f"on, and hosts take turns in 16-bit ones from {turns} on; what is exchanged goes {pieces}; "
        f"all_reduce takes a tree of hosts from {tree} on"
    )

"""How long an all_reduce of gradients between hosts takes with each of several algorithms; pure.

Times have four parts: bytes on a host's link, the delay of every message that is waited for, a core's work
per message and byte that it sends or receives, and adding up in shared memory. What can overlap does, so the
longest counts. Bytes and steps are those of docs/algorithms.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "ALGORITHMS",
    "LEAST_OF_RING",
    "LEAST_OF_TURN",
    "MIB",
    "USUAL_LINK",
    "Cluster",
    "Prediction",
    "all_at_once",
    "carried",
    "doubled",
    "in_parts",
    "in_ring",
    "in_turns",
    "least_part",
    "may_take_turns",
    "most_carried",
    "predict",
    "predict_buckets",
]

MIB = 1 << 20
USUAL_LINK = 1e9  # bytes per second, if unknown
# How the native core cuts what travels (csrc/torch/hosts); a test compares these constants with the core's.
MOST_OF_SUM, MOST_OF_BLOCK = 2 * MIB, MIB
LEAST_OF_PART, FEWEST_PARTS = 64 << 10, 4
MOST_OF_PART, LEAST_IN_CHAIN, FEWEST_IN_CHAIN = MIB, 16 << 10, 48
FEWEST_IN_SHORT_CHAIN, FEWEST_IN_RING = 8, 2
LEAST_IN_RING, LEAST_OF_RING = 32 << 10, 18 << 10
LEAST_OF_TURN, MOST_OF_TURN = 20 << 10, 48 << 10
# To all other hosts together, with the comparison of calls.
MOST_CARRIED_TO_ONE, MOST_CARRIED_TO_SEVERAL = 32 << 10, 128 << 10
LEAST_OF_CUT = 64
# The smallest part that all hosts send to all others at once, and how long it occupies a link, so that its
# rounds in shared memory and its messages count little.
LEAST_OF_SUM, SECONDS_OF_PART = 256 << 10, 1.5e-3
# How much longer than for its bytes a link takes if hosts send cuts of LEAST_OF_RING or more to several
# others at once, as measured between four: they queue for one link while another is idle.
CROWDED = 1.3
# The share of a float32 value's four bytes that travels.
SHARES = {"exact": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": (1 + 4 / 256) / 4}


@dataclass(frozen=True)
class Cluster:
    """Identical hosts, each with one link to a network of unlimited capacity.

    Attributes:
        hosts: the number of hosts.
        ranks: the number of ranks on each.
        link: bytes per second over a host's link, each way, without headers.
        delay: seconds that a message is in transit between hosts.
        memory: bytes per second of a tensor that the ranks of a host all_reduce among themselves.
        sockets: bytes per second that one rank sends or receives, while all others on its host do, too.
        coding: bytes per second of float32 values that one rank compresses or expands, likewise.
        message: seconds for sending or receiving a message, however small.
    """

    hosts: int
    ranks: int
    link: float
    delay: float = 20e-6
    memory: float = 5e9
    sockets: float = 2e9
    coding: float = 2e9
    message: float = 5e-6

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: a number is not positive; ``delay`` and ``message`` may be 0.
        """
        for name in ("hosts", "ranks", "link", "memory", "sockets", "coding"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        for name in ("delay", "message"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Prediction:
    """What one algorithm needs.

    Attributes:
        seconds: from the first rank's call to the last one's result.
        crossing: bytes over the busiest link, one way.
    """

    seconds: float
    crossing: float


def predict(algorithm: str, cluster: Cluster, nbytes: float) -> Prediction:
    """Predict one all_reduce of ``nbytes`` of float32 with one of :data:`ALGORITHMS`.

    Raises:
        KeyError: there is no such algorithm.
    """
    if nbytes == 0 or cluster.hosts * cluster.ranks == 1:
        return Prediction(0.0, 0.0)
    if cluster.hosts == 1 and algorithm != "ring":
        return Prediction(nbytes / cluster.memory, 0.0)
    return ALGORITHMS[algorithm](cluster, nbytes)


def predict_buckets(algorithm: str, cluster: Cluster, nbytes: float, bucket: float) -> Prediction:
    """Predict consecutive all_reduces of a model's gradients in buckets of ``bucket`` bytes."""
    count = max(1, math.ceil(nbytes / bucket))
    one = predict(algorithm, cluster, nbytes / count)
    return Prediction(count * one.seconds, count * one.crossing)


def _ring(cluster: Cluster, nbytes: float) -> Prediction:
    """Predict a ring of all ranks that ignores hosts, like Gloo's: each step waits for the previous one."""
    size = cluster.hosts * cluster.ranks
    steps = 2 * (size - 1)
    chunk = nbytes / size
    crossing = steps * chunk if cluster.hosts > 1 else 0.0
    moving = max(chunk / cluster.link if cluster.hosts > 1 else 0.0, 2 * chunk / cluster.sockets)
    waiting = cluster.delay if cluster.hosts > 1 else 0.0
    return Prediction(steps * (moving + waiting + 2 * cluster.message), crossing)


def _tree(cluster: Cluster, nbytes: float) -> Prediction:
    """Predict a reduce to one rank and a broadcast from it, over a chain or binary tree of hosts."""
    parts = max(1, math.ceil(nbytes / _part_of_chain(cluster.hosts, nbytes)))
    fan, depth = _shape(cluster.hosts, parts)
    part = nbytes / parts
    moving = max(part / cluster.link, part / cluster.sockets + part / cluster.memory)
    step = moving + 2 * cluster.message
    steps = fan * (parts + max(depth - 1, 0))
    one_way = _comparison(cluster) + steps * step + depth * cluster.delay + part / cluster.memory
    return Prediction(2 * one_way, fan * nbytes)


def _levels(share: float) -> Callable[[Cluster, float], Prediction]:
    """Predict ours: sums in shared memory, exchanged between hosts, where ``share`` of each value crosses."""

    def found(cluster: Cluster, nbytes: float) -> Prediction:
        parts = in_parts(cluster, nbytes, share)
        if nbytes * share > most_carried(cluster.hosts):
            return parts
        return min(carried(cluster, nbytes, share), parts, key=lambda way: way.seconds)

    return found


def carried(cluster: Cluster, nbytes: float, share: float = 1.0) -> Prediction:
    """The first ranks exchange their hosts' sums with the comparison of calls."""
    others = cluster.hosts - 1
    crossing = others * nbytes * share
    coding = nbytes * (1 + cluster.hosts) / cluster.coding if share < 1 else 0.0
    moving = max(crossing / cluster.link, 2 * crossing / cluster.sockets)
    seconds = _comparison(cluster) + moving + nbytes / cluster.memory + coding
    return Prediction(seconds, crossing)


def in_parts(cluster: Cluster, nbytes: float, share: float = 1.0) -> Prediction:
    """Parts follow each other; while some cross, others are added up."""
    at_once = all_at_once(cluster, nbytes, share)
    if share < 1 or not may_take_turns(cluster, nbytes, LEAST_OF_RING):
        return at_once
    return min(in_ring(cluster, nbytes), at_once, key=lambda way: way.seconds)


def may_take_turns(cluster: Cluster, nbytes: float, least: int) -> bool:
    """Whether cuts have this size, and exceed what the comparison of calls may carry in any network."""
    others = cluster.hosts - 1
    if others < 2 or nbytes <= MOST_CARRIED_TO_SEVERAL // others:
        return False
    return _part_in_ring(cluster, nbytes) / cluster.hosts / cluster.ranks >= least


def all_at_once(cluster: Cluster, nbytes: float, share: float = 1.0) -> Prediction:
    """Every host sends to all others: cuts, then their sums; or between two hosts, slices."""
    exchanged = cluster.hosts == 2 and share == 1  # the two hosts' sums, in one step
    if exchanged:
        part = _part(nbytes, MOST_OF_PART, FEWEST_PARTS)
    elif share == 1 and may_take_turns(cluster, nbytes, LEAST_OF_RING):
        part = _part_in_ring(cluster, nbytes)
    else:
        least = least_part(cluster) if share == 1 else LEAST_OF_SUM
        part = _part(nbytes, MOST_OF_SUM, FEWEST_PARTS, least)
    parts, steps = math.ceil(nbytes / part), 1 if exchanged else 2
    crowds = cluster.hosts > 2 and share * nbytes / parts / cluster.hosts / cluster.ranks >= LEAST_OF_RING
    return _followed(cluster, nbytes, parts, steps, share=share, crowded=CROWDED if crowds else 1.0)


def least_part(cluster: Cluster) -> int:
    """Return the smallest part of an exact sum that all hosts send to all others at once."""
    return doubled(LEAST_OF_SUM, min(SECONDS_OF_PART * cluster.link, MOST_OF_SUM))


def doubled(size: int, least: float) -> int:
    """Return a size, doubled until it is at least ``least``."""
    while size < least:
        size *= 2
    return size


def in_ring(cluster: Cluster, nbytes: float) -> Prediction:
    """Along a ring of hosts: each sends to one other, and waits for one.

    Parts that travel meanwhile hide one of these waits, according to measurements with a delay. Or a single
    part has one wait less, if the first cut travels with the comparison of calls.
    """
    parts = math.ceil(nbytes / _part_in_ring(cluster, nbytes))
    if parts == 1 and _may_halve(cluster, nbytes):  # its cuts travel in pieces
        parts = FEWEST_IN_RING
    most = min(MOST_CARRIED_TO_ONE, most_carried(cluster.hosts))
    framed = cluster.ranks == 1 and nbytes / cluster.hosts <= most
    steps = 2 * (cluster.hosts - 1)
    return _followed(cluster, nbytes, parts, steps if parts == 1 and not framed else steps - 1)


def in_turns(cluster: Cluster, nbytes: float) -> Prediction:
    """Each host sends to one other at a time, and is late for some part of many."""
    cuts = cluster.hosts * cluster.ranks
    parts = math.ceil(nbytes / (MOST_OF_TURN * cuts))
    if nbytes / FEWEST_IN_RING / cuts >= LEAST_OF_TURN:
        parts = max(parts, FEWEST_IN_RING)
    return _followed(cluster, nbytes, parts, 2 * (cluster.hosts - 1) + parts)


def _followed(
    cluster: Cluster, nbytes: float, parts: int, steps: int, *, share: float = 1.0, crowded: float = 1.0
) -> Prediction:
    """So many parts, each with so many steps that wait."""
    others = cluster.hosts - 1
    part = nbytes / parts
    # A rank cuts its slice of the part for the hosts, in cache lines, so some of many hosts get none.
    slice_bytes = part / cluster.ranks
    cut = max(slice_bytes / cluster.hosts, LEAST_OF_CUT)
    partners = min(others, slice_bytes / cut)
    sent = 2 * cut * partners * share  # per rank: cuts, and its sum to all; or its slice
    crossing = sent * cluster.ranks
    coding = 2 * cut * (partners + 1) * 2 / cluster.coding if share < 1 else 0.0
    sockets = 2 * sent / cluster.sockets + (2 if steps == 1 else 4) * partners * cluster.message
    here = part / cluster.memory
    steady = max(crowded * crossing / cluster.link, here + coding + sockets)
    comparison = cluster.delay + 2 * cluster.message  # also around a ring
    seconds = comparison + here + parts * steady + steps * cluster.delay
    return Prediction(seconds, parts * crossing)


def most_carried(hosts: int) -> int:
    """Return the bytes to each other host that may travel with the comparison of calls, in any network."""
    if hosts == 2:
        return MOST_CARRIED_TO_ONE
    return MOST_CARRIED_TO_SEVERAL // (hosts - 1) // LEAST_OF_CUT * LEAST_OF_CUT


def _comparison(cluster: Cluster) -> float:
    """The first ranks of all hosts compare calls."""
    return cluster.delay + 2 * (cluster.hosts - 1) * cluster.message


def _part(nbytes: float, most: int, fewest: int, least: float = LEAST_OF_PART) -> float:
    return min(max(nbytes / fewest, least), most)


def _part_in_ring(cluster: Cluster, nbytes: float) -> float:
    whole = nbytes <= MOST_OF_BLOCK // cluster.ranks or not _may_halve(cluster, nbytes)
    return _part(nbytes, MOST_OF_SUM, 1 if whole else FEWEST_IN_RING)


def _may_halve(cluster: Cluster, nbytes: float) -> bool:
    """Whether cuts of half of a sum are large enough for a ring."""
    return nbytes / FEWEST_IN_RING / cluster.hosts / cluster.ranks >= LEAST_IN_RING


def _part_of_chain(hosts: int, nbytes: float) -> float:
    if hosts <= 2:
        return _part(nbytes, MOST_OF_PART, FEWEST_PARTS)
    least = min(max(nbytes / FEWEST_IN_SHORT_CHAIN, LEAST_IN_CHAIN), LEAST_OF_PART)
    return _part(nbytes, MOST_OF_PART, FEWEST_IN_CHAIN, least)


def _shape(hosts: int, parts: int) -> tuple[int, int]:
    """Return branches and depth of the shape that needs fewer steps."""
    depth = math.ceil(math.log2(hosts + 1)) - 1
    chain, tree = (1, hosts - 1), (2, depth)
    return min(chain, tree, key=lambda shape: shape[0] * (parts + max(shape[1] - 1, 0)))


ALGORITHMS: dict[str, Callable[[Cluster, float], Prediction]] = {
    "ring": _ring,
    "tree": _tree,
    "levels": _levels(SHARES["exact"]),
    "levels, bf16": _levels(SHARES["bf16"]),
    "levels, int8": _levels(SHARES["int8"]),
}

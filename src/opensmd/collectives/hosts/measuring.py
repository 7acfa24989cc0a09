"""Measuring the network between two hosts while a group is created, and agreeing on what follows.

The first ranks of the first two hosts exchange a few messages; the first one announces the result to all.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from opensmd.collectives.exchange import Exchange
from opensmd.collectives.hosts.choices import Thresholds, in_words, thresholds
from opensmd.collectives.hosts.cost_model import USUAL_LINK, Cluster

__all__ = ["agree_on_thresholds"]

ROUNDS = 6
TAG = 0x7F534D44  # no other message of the group is in transit
LARGE = 256 << 10  # bytes; 2 ms at 1 Gbit/s
FASTEST, LONGEST = 100e9, 1.0  # bounds of plausible measurements: bytes per second, and seconds


def agree_on_thresholds(
    gloo: Any,
    exchange: Exchange,
    place: int,
    hosts: Sequence[Sequence[int]],
    given: Mapping[str, float],
    *,
    report: str,
) -> Thresholds:
    """Return what is best for this group, the same for all members; none returns before all have called.

    Args:
        gloo: torch's Gloo of all members.
        exchange: the group's.
        place: this rank's position in the group.
        hosts: the positions on each host.
        given: fields of the cluster that need not be measured or guessed; those of position 0 count.
        report: the group's name, if position 0 should print its findings; else empty.

    Raises:
        DistBackendError: a rank does not come, or the network fails.
    """
    pair = (hosts[0][0], hosts[1][0])
    measured: dict[str, float] = {}
    if place in pair:
        measures = not {"link", "delay"} <= set(given)
        measured = exchange.within("measuring the network", lambda: _measure(gloo, place, pair, measures))
    text = ""
    if place == pair[0]:
        usual = _cluster(hosts, given)
        cluster = _cluster(hosts, {**measured, **given})
        chosen = thresholds(cluster, usual=usual)
        text = json.dumps(asdict(chosen))
        if report:
            names = [name for name in measured if name not in given]
            print(f"smddp: {report}: {in_words(cluster, chosen, names)}", file=sys.stderr, flush=True)
    announced = exchange.all_gather("thresholds", text)[pair[0]]
    exchange.close("thresholds-told")
    return Thresholds(**json.loads(announced))


def _cluster(hosts: Sequence[Sequence[int]], known: Mapping[str, float]) -> Cluster:
    return Cluster(len(hosts), max(map(len, hosts)), **{"link": USUAL_LINK, **known})


def _measure(gloo: Any, place: int, pair: tuple[int, int], wanted: bool) -> dict[str, float]:
    """Return what position ``pair[0]`` measures, if that one wants to; nothing on the other one."""
    cpu = torch.device("cpu")  # whatever the script's default device
    small = torch.full((8,), int(wanted), dtype=torch.uint8, device=cpu)
    large = torch.zeros(LARGE, dtype=torch.uint8, device=cpu)
    if place == pair[1]:
        gloo.recv([small], pair[0], TAG).wait()
        for tensor in ([small] * ROUNDS + [large] * 2) if small[0] else ():
            gloo.recv([tensor], pair[0], TAG).wait()
            gloo.send([small], pair[0], TAG).wait()
        return {}
    gloo.send([small], pair[1], TAG).wait()
    if not wanted:
        return {}

    def there_and_back(tensor: torch.Tensor) -> float:
        begin = time.perf_counter()
        answer = gloo.recv([small], pair[1], TAG)
        gloo.send([tensor], pair[1], TAG).wait()
        answer.wait()
        return time.perf_counter() - begin

    # Of several, the fastest: others were disturbed.
    delay = min(there_and_back(small) for _ in range(ROUNDS)) / 2
    seconds = min(there_and_back(large) for _ in range(2)) - 2 * delay
    return {"link": LARGE / max(seconds, LARGE / FASTEST), "delay": min(delay, LONGEST)}

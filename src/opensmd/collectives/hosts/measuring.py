"""How fast the network between two hosts is, measured while a group is made, and what its members make of it.

The first ranks of the first two hosts send each other a few messages; the first one says to all what follows.
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
TAG = 0x7F534D44  # no other message of the group is under way
LARGE = 256 << 10  # bytes; 2 ms at 1 Gbit/s
FASTEST, LONGEST = 100e9, 1.0  # bytes a second and seconds that a measurement may give


def agree_on_thresholds(
    gloo: Any,
    exchange: Exchange,
    place: int,
    hosts: Sequence[Sequence[int]],
    given: Mapping[str, float],
    *,
    report: str = "",
) -> Thresholds:
    """Return what is best for this group, the same for all members; none returns before all have come here.

    Args:
        gloo: torch's, of all members.
        exchange: of the group.
        place: of this rank in it.
        hosts: the places on each host.
        given: fields of the cluster that need not be measured or guessed; those of place 0 count.
        report: a name of the group, where place 0 is to print what it has found.

    Raises:
        DistBackendError: a rank does not come, or the network fails.
    """
    pair = (hosts[0][0], hosts[1][0])
    measured: dict[str, float] = {}
    if place in pair and not {"link", "delay"} <= set(given):
        measured = exchange.within("measuring the network", lambda: _measure(gloo, place, pair))
    text = ""
    if place == pair[0]:
        usual = _cluster(hosts, given)
        cluster = _cluster(hosts, {**measured, **given})
        chosen = thresholds(cluster, usual=usual)
        text = json.dumps(asdict(chosen))
        if report:
            names = [name for name in measured if name not in given]
            print(f"smddp: {report}: {in_words(cluster, chosen, names)}", file=sys.stderr, flush=True)
    said = exchange.all_gather("thresholds", text)[pair[0]]
    exchange.close("thresholds-told")
    return Thresholds(**json.loads(said))


def _cluster(hosts: Sequence[Sequence[int]], known: Mapping[str, float]) -> Cluster:
    return Cluster(len(hosts), max(map(len, hosts)), **{"link": USUAL_LINK, **known})


def _measure(gloo: Any, place: int, pair: tuple[int, int]) -> dict[str, float]:
    """What place ``pair[0]`` finds; nothing on the other one."""
    small = torch.zeros(8, dtype=torch.uint8, device="cpu")  # whatever device the script has made the default
    large = torch.zeros(LARGE, dtype=torch.uint8, device="cpu")
    if place == pair[1]:
        for tensor in [small] * ROUNDS + [large] * 2:
            gloo.recv([tensor], pair[0], TAG).wait()
            gloo.send([small], pair[0], TAG).wait()
        return {}

    def there_and_back(tensor: torch.Tensor) -> float:
        begin = time.perf_counter()
        answer = gloo.recv([small], pair[1], TAG)
        gloo.send([tensor], pair[1], TAG).wait()
        answer.wait()
        return time.perf_counter() - begin

    # Of several, the fastest: others met something else on the machine.
    delay = min(there_and_back(small) for _ in range(ROUNDS)) / 2
    seconds = min(there_and_back(large) for _ in range(2)) - 2 * delay
    return {"link": LARGE / max(seconds, LARGE / FASTEST), "delay": min(delay, LONGEST)}

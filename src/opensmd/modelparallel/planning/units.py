"""The units of a trace in the order in which they are cut, with the cost of a cut between them.

Some units cannot stay where they ran: units that share a parameter go with one leader of their group, and one
placed by hand against the order leaves the sequence. A parameterless unit goes with the unit before it if
that moves, and is never a stage's only one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from opensmd.modelparallel.planning.balance import Sequence1D, Split, split_evenly
from opensmd.modelparallel.planning.plan import ancestors
from opensmd.modelparallel.planning.trace import ModelTrace

__all__ = [
    "BETWEEN_GPUS",
    "ON_ONE_HOST",
    "OPERATION_SECONDS",
    "Link",
    "Links",
    "UnitGroups",
    "UnitSequence",
    "Weights",
    "weights_of",
]

# The cost of opening a module for the stages that share it: intercepting one operation outside atomic
# modules.
OPERATION_SECONDS = 10e-6

# If the estimate sees so little work that the cheapest cut would cost this share of an average stage, it does
# not justify placing equal modules unequally: cuts are then scaled to this share of an average item.
DEAR_CUT = 1 / 4
CUT_OF_ITEM = 1 / 2

# If a model needs less memory than this in total, memory counts for less and time for more: balancing
# kilobytes is pointless.
SMALL_MEMORY = 64 << 20

# With more groups of shared parameters than this, not all combinations of first and last are tried.
MOST_COMBINATIONS = 64

# A parameter that a few units use (an embedding's weight as the output layer) keeps them together if sending
# it in every microbatch would be expensive: if it is more than this share of all parameters.
LARGE_SHARE = 1 / 64
FEW_USERS = 4


@dataclass(frozen=True)
class Link:
    """A link that carries tensors from one stage to another.

    Attributes:
        message: seconds per message, however small.
        rate: bytes per second.
    """

    message: float
    rate: float

    def seconds(self, size: float, tensors: int = 1) -> float:
        """Return the time for so many tensors of ``size`` bytes in total, one way."""
        return tensors * self.message + size / self.rate


# Between two processes on one host: a message's fixed cost, and its copy.
ON_ONE_HOST = Link(message=60e-6, rate=4e9)

# Between two GPUs of one host, as their makers state it for those with links of their own.
BETWEEN_GPUS = Link(message=100e-6, rate=100e9)


@dataclass(frozen=True)
class Links:
    """The links between stages that may be on several hosts.

    Attributes:
        between_hosts: the link between hosts.
        apart: pairs of stages on different hosts, the lower one first.
        averaging: seconds on a host's link per byte of a stage's gradients that replicas average, while the
            other stages do the same.
        on_one_host: the link between ranks of one host.
    """

    between_hosts: Link = ON_ONE_HOST
    apart: frozenset[tuple[int, int]] = frozenset()
    averaging: float = 0.0
    on_one_host: Link = ON_ONE_HOST

    def cross(self, one: int, other: int) -> bool:
        """Whether these stages are on different hosts."""
        return (min(one, other), max(one, other)) in self.apart

    def between(self, one: int, other: int) -> Link:
        """Return the link between these stages."""
        return self.between_hosts if self.cross(one, other) else self.on_one_host


@dataclass(frozen=True)
class Weights:
    """The terms of the objective."""

    memory: float
    optimizer_bytes: float
    in_flight: Sequence[int]


@dataclass(frozen=True)
class UnitGroups:
    """Units that must stay together although others run between them, and units fixed against the order."""

    members: tuple[tuple[int, ...], ...]
    joined: Mapping[int, int]  # parameterless unit -> the unit it moves with

    @classmethod
    def of(cls, trace: ModelTrace, wanted: Mapping[int, int]) -> UnitGroups:
        """Return the groups of ``trace``; a unit with a ``wanted`` stage joins none."""
        union = _Union(len(trace.units))
        for _, units in _bonds(trace):
            union.join(*units)
        groups = union.groups()
        moved = set(wanted).union(*groups)
        anchored = moved | _with_parameters(trace)
        joined: dict[int, int] = {}
        for index in range(1, len(trace.units)):
            before = joined.get(index - 1, index - 1)
            if index not in anchored and before in moved:
                joined[index] = before
        return cls(tuple(groups), joined)

    def candidates(self) -> list[tuple[int, ...]]:
        """Return which member leads each group: every combination of last and first, or two of them.

        Last comes first: an embedding that moves to the output layer only adds a short hop before the
        pipeline, while an output layer that moves to the embedding makes every microbatch pass stage 0 twice.
        """
        ends = [(group[-1], group[0]) for group in self.members]
        if 2 ** len(ends) <= MOST_COMBINATIONS:
            return [tuple(leads) for leads in itertools.product(*ends)]
        return [tuple(last for last, _ in ends), tuple(first for _, first in ends)]


def _with_parameters(trace: ModelTrace) -> set[int]:
    return {trace.anchors[name] for name, info in trace.modules.items() if info.parameters}


def weights_of(trace: ModelTrace, units: Collection[int]) -> list[str]:
    """Return the names of the weights for which ``units`` must stay together."""
    return list(dict.fromkeys(name for name, users in _bonds(trace) if not set(users).isdisjoint(units)))


def _bonds(trace: ModelTrace) -> Iterator[tuple[str, Sequence[int]]]:
    """Return weights that several units use, by name, and these units."""
    for names in trace.shared:
        yield names[0], [trace.anchors[trace.owner(name)] for name in names]
    parameters = sum(info.parameter_bytes for info in trace.modules.values())
    for reuse in trace.reuses:
        dear = reuse.bound or reuse.bytes > parameters * LARGE_SHARE
        if dear and len(reuse.units) <= FEW_USERS:
            yield reuse.name, reuse.units


@dataclass(frozen=True)
class UnitSequence:
    """Units in the order in which they are cut; ``position`` says which item each belongs to."""

    trace: ModelTrace
    position: Mapping[int, int]
    count: int
    fixed: tuple[int, ...]
    detached: Mapping[int, int]  # unit -> stage, for units fixed against the order

    @classmethod
    def of(
        cls,
        trace: ModelTrace,
        groups: UnitGroups,
        leads: Sequence[int],
        *,
        wanted: Mapping[int, int],
        keep_fixed: bool,
    ) -> UnitSequence:
        """Return the sequence with these group leaders.

        ``wanted`` are fixed stages of units. With ``keep_fixed``, fixed units stay in the sequence, which
        must then reach their stages there, as long as those rise; otherwise none stays.
        """
        lead_of = {unit: lead for group, lead in zip(groups.members, leads, strict=True) for unit in group}
        wishes: dict[int, int] = {}
        for unit, stage in wanted.items():
            wishes.setdefault(lead_of.get(unit, unit), stage)
        kept: list[int] = []
        fixed: list[int] = []
        detached: dict[int, int] = {}
        for unit in range(len(trace.units)):
            if unit in groups.joined or lead_of.get(unit, unit) != unit:
                continue
            stage = wishes.get(unit, -1)
            if stage >= 0 and not (keep_fixed and stage >= max(fixed, default=0)):
                detached[unit] = stage
            else:
                kept.append(unit)
                fixed.append(stage)
        item = {head: index for index, head in enumerate(kept)}
        position: dict[int, int] = {}
        for unit in range(len(trace.units)):
            head = groups.joined.get(unit, unit)
            head = lead_of.get(head, head)
            if head in detached:
                detached[unit] = detached[head]
            else:
                position[unit] = item[head]
        return cls(trace, position, len(kept), tuple(fixed), detached)

    def cut(self, weights: Weights, links: Sequence[Link]) -> Split:
        """Return the best split of this sequence; ``links`` are those from each stage to the next."""
        trace, stages = self.trace, len(links) + 1
        seconds = [unit.forward_seconds + unit.backward_seconds for unit in trace.units]
        training = trace.training_bytes(weights.optimizer_bytes)
        activations = [unit.activation_bytes for unit in trace.units]
        cuts = {link: self.cut_seconds(link) for link in set(links)}
        scale = self._weight_of_cuts(cuts.values(), sum(seconds), stages)
        if not any(seconds):  # nothing ran, so only sizes are known
            seconds = training
        needed = sum(training) + sum(activations) * sum(weights.in_flight) / stages
        memory_weight = weights.memory * min(1.0, needed / SMALL_MEMORY)
        time_share = (1 - memory_weight) / (sum(seconds) or 1.0)
        memory_share = memory_weight / (needed or 1.0)
        even = [0.0] * self.count
        staged = [0.0] * self.count
        preload = [0.0] * stages
        for unit in range(len(trace.units)):
            share = seconds[unit] * time_share + training[unit] * memory_share
            if unit in self.detached:
                stage = self.detached[unit]
                preload[stage] += share + activations[unit] * memory_share * weights.in_flight[stage]
            else:
                even[self.position[unit]] += share
                staged[self.position[unit]] += activations[unit] * memory_share
        return split_evenly(
            Sequence1D(
                even=even,
                staged=staged,
                weights=weights.in_flight,
                cuts=[[second * scale * time_share for second in cuts[link]] for link in links],
                fixed=self.fixed,
                preload=preload,
                alone=self._alone(),
            )
        )

    def _alone(self) -> list[bool]:
        """Return which items may be a stage's only one: those with parameters, or all if none has any."""
        own = {self.position[unit] for unit in _with_parameters(self.trace) - self.detached.keys()}
        return [item in own or not own for item in range(self.count)]

    def cut_seconds(self, link: Link = ON_ONE_HOST) -> list[float]:
        """Return what a cut before each item costs each side: messages, bytes, and glue of split modules."""
        cost = [0.0] * (self.count + 1)
        spans: dict[tuple[int, int], tuple[int, int, int]] = {}
        for edge in self.trace.edges:
            if edge.source in self.detached or edge.target in self.detached:
                continue
            start, end = self.position[edge.source], self.position[edge.target]
            low, high, size = spans.get((edge.tensor, start), (start, start, edge.bytes))
            spans[edge.tensor, start] = (min(low, end), max(high, end), size)
        for (_, start), (low, high, size) in spans.items():
            seconds = 2 * link.seconds(size)  # forward and backward
            cost[low + 1] += seconds if low < start else 0.0
            cost[start + 1] += (seconds if high > start else 0.0) - (seconds if low < start else 0.0)
            cost[high + 1] -= seconds if high > start else 0.0
        sums = list(itertools.accumulate(cost))
        return [total + glue for total, glue in zip(sums, self._glue_seconds(), strict=False)]

    def _weight_of_cuts(self, cuts: Iterable[Sequence[float]], work: float, stages: int) -> float:
        """Return the weight of cut seconds against ``work`` seconds; less if there is hardly any work."""
        cheapest = min((seconds for cut in cuts for seconds in cut[1 : self.count]), default=0.0)
        if cheapest <= DEAR_CUT * work / stages:
            return 1.0
        return CUT_OF_ITEM * work / self.count / cheapest

    def _glue_seconds(self) -> list[float]:
        """Return interception in the modules that a cut before each item opens, beyond what any cut opens."""
        operations: dict[str, int] = {}
        for name, info in self.trace.modules.items():
            operations[name] = info.operations
            parent = name.rpartition(".")[0]
            if name and parent in operations:
                operations[parent] += info.calls
        cost = [0.0] * self.count
        for unit, item in self.position.items():
            if unit and self.position.get(unit - 1, item) < item:
                opened = ancestors(self.trace.units[unit].module)
                cost[item] = sum(operations[name] for name in opened) * OPERATION_SECONDS
        least = min(cost[1:], default=0.0)
        return [max(0.0, share - least) for share in cost]

    def stages_of_units(self, split: Split) -> dict[int, int]:
        """Return the stage of every unit under ``split``."""
        of_item = [
            stage
            for stage in range(len(split.bounds) - 1)
            for _ in range(split.bounds[stage], split.bounds[stage + 1])
        ]
        return {**{unit: of_item[item] for unit, item in self.position.items()}, **self.detached}


class _Union:
    """Disjoint sets of units."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, unit: int) -> int:
        while self._parent[unit] != unit:
            unit = self._parent[unit]
        return unit

    def join(self, *units: int) -> None:
        first, *others = sorted({self.find(unit) for unit in units})
        for other in others:
            self._parent[other] = first

    def groups(self) -> list[tuple[int, ...]]:
        """Return the sets of more than one unit, each sorted."""
        by_root: dict[int, list[int]] = defaultdict(list)
        for unit in range(len(self._parent)):
            by_root[self.find(unit)].append(unit)
        return [tuple(group) for group in by_root.values() if len(group) > 1]

"""What happens in a case: drawn from a seed, so that every case can be had again. Pure.

A case is a stream of calls in one group. One member, the victim, misbehaves at one call of it, or is struck
by a signal from outside at a moment that nobody chose.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.faults.campaign.hosts import host_of

__all__ = [
    "DEADLY",
    "FAULTS",
    "FAULTS_ON_HOSTS",
    "HARMLESS",
    "MESSAGES",
    "MISMATCHES",
    "OF_LINKS",
    "OPERATIONS",
    "SILENT",
    "Case",
    "draw",
    "draw_on_hosts",
]

# Deadly: peers are told soon. Silent: at the timeout. Mismatches: as soon as all have called.
# The rest harms nobody.
DEADLY = ("kill", "exit", "exception", "destroy", "abort")
SILENT = ("stop", "absent")
MISMATCHES = ("other operation", "other size", "other dtype", "other reduction", "other root")
HARMLESS = ("late", "pause", "forked child", "refused arguments", "signals")
FAULTS = (*DEADLY, *SILENT, *MISMATCHES, *HARMLESS)
# Between hosts.
OF_LINKS = ("cut link", "slow link")
FAULTS_ON_HOSTS = ("kill", "stop", *OF_LINKS, *MISMATCHES)

COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
)
WITHOUT_DATA = ("barrier", "monitored_barrier")
OBJECTS = ("all_gather_object", "broadcast_object_list")
MESSAGES = ("send and recv", "ring", "batch_isend_irecv")
OPERATIONS = (*COLLECTIVES, *WITHOUT_DATA, *OBJECTS, *MESSAGES)
REDUCTIONS = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
SYNCHRONOUS = ("monitored_barrier", *OBJECTS, *MESSAGES)  # or asynchronous by their nature

DTYPES = ("float32", "float64", "int32", "int64", "bfloat16", "uint8")
DTYPES_OF_GLOO = ("float32", "float64", "int32", "int64", "uint8")


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        trial: its number in the campaign, which also seeds what tensors hold.
        ranks: of the job.
        members: global ranks of the group whose call goes wrong.
        victim: the member, by global rank, that misbehaves.
        operation: the call that the fault falls upon.
        others: operations of the sound calls before and after it, in turn.
        fault: what the victim does.
        moment: "instead" of its call; "within" it, while the others are yet to come; "issued", when it has
            begun an asynchronous one and not waited for it; or "anytime", struck from outside.
        calls: sound calls before that.
        delay: seconds until a blow from outside or from a thread of the victim.
        elements: of each rank's tensor.
        dtype: by torch's name.
        root: the group's rank that is the root of calls with one.
        asynchronous: whether calls are made with ``async_op``, a few at once.
        timeout: of the group, in seconds.
        tidy: whether the ranks' interpreters end as a script's does, which takes each of them half a second.
        on_hosts: whether the ranks are on two hosts.
    """

    trial: int
    ranks: int
    members: tuple[int, ...]
    victim: int
    operation: str
    others: tuple[str, ...]
    fault: str
    moment: str
    calls: int
    delay: float
    elements: int
    dtype: str
    root: int
    asynchronous: bool
    timeout: float
    tidy: bool
    on_hosts: bool = False

    @property
    def ends_the_group(self) -> bool:
        """Whether every other member must get an error."""
        return self.fault not in (*HARMLESS, "slow link") and not self.is_refused_message

    @property
    def expires(self) -> bool:
        """Whether the others learn of the fault only when their patience ends."""
        unanswered = self.operation == "send and recv" and self.fault == "other operation"
        return self.fault in SILENT or unanswered or self.on_hosts

    @property
    def is_refused_message(self) -> bool:
        """Whether a message does not fit its receiver: that call fails there, and the group goes on."""
        wrong = self.operation == "send and recv" and self.fault in ("other size", "other dtype")
        return wrong and not self.crosses

    def operation_of(self, number: int) -> str:
        """What all members call as call ``number``."""
        if number == self.calls and self.moment != "anytime":
            return self.operation
        return self.others[number % len(self.others)]

    @property
    def crosses(self) -> bool:
        """Whether the message of a call "send and recv" goes from one host to the other."""
        return self.on_hosts and len({host_of(rank, self.ranks) for rank in self.parties}) == 2

    @property
    def accused(self) -> set[int]:
        """The ranks one of which an error must name, by global ranks, and no others."""
        waits = ("other operation", *(("other size", "other dtype") if self.crosses else ()))
        if self.operation == "send and recv" and self.fault in waits:
            return set(
                self.parties
            )  # each waits for the other, and the first to lose patience speaks for all
        return {self.parties[0]} if self.is_refused_message else {self.victim}

    @property
    def parties(self) -> tuple[int, int]:
        """Global ranks of the sender and the receiver in calls "send and recv"."""
        return self.members[self.root], self.members[(self.root + 1) % len(self.members)]


def draw(
    seed: int, trial: int, ranks: list[int], timeout: float = 3.0, faults: tuple[str, ...] = FAULTS
) -> Case:
    """Case ``trial`` of the campaign ``seed``; the same for every backend."""
    chance = random.Random(seed * 1_000_003 + trial)
    size = chance.choice(ranks)
    members = tuple(range(size))
    if size > 2 and chance.random() < 0.5:
        members = tuple(sorted(chance.sample(members, chance.randint(2, size - 1))))
    # Faults in turn, so that a short campaign has all kinds.
    fault = faults[trial % len(faults)]
    operation = chance.choice([name for name in OPERATIONS if applies(fault, name)])
    case = Case(
        trial=trial,
        ranks=size,
        members=members,
        victim=chance.choice(members),
        operation=operation,
        others=tuple(chance.sample(OPERATIONS, 3)),
        fault=fault,
        moment=chance.choice(moments(fault, operation)),
        calls=chance.randint(0, 5),
        delay=chance.choice([0.0, 0.001, 0.01, 0.1]) + chance.uniform(0.0, 0.02),
        elements=chance.choice([1, 13, 100, 5_000, 70_000, 600_000]),
        dtype=chance.choice(DTYPES_OF_GLOO),
        root=chance.randrange(len(members)),
        asynchronous=chance.random() < 0.4,
        timeout=timeout,
        tidy=chance.random() < 0.2,
    )
    if operation == "send and recv":
        # Who waits for a message knows that it is missing; nobody waits for a receiver.
        sender_only = fault == "other operation"
        case = replace(case, victim=case.parties[0] if sender_only else chance.choice(case.parties))
    return case


def draw_on_hosts(seed: int, trial: int, ranks: list[int], timeout: float = 3.0) -> Case:
    """Likewise on two hosts; every member is one of the job, so that the group spans both."""
    case = draw(seed, trial, ranks, timeout, FAULTS_ON_HOSTS)
    members = tuple(range(case.ranks))
    case = replace(case, members=members, root=case.root % len(members), on_hosts=True)
    if case.operation == "send and recv":
        case = replace(case, victim=case.parties[0])
    return case


def applies(fault: str, operation: str) -> bool:
    """Whether a fault can be told from a sound call of the operation."""
    if fault in ("other size", "other dtype"):
        return operation in COLLECTIVES or operation == "send and recv"
    if fault == "other reduction":
        return operation in REDUCTIONS
    if fault == "other root":
        return operation in ROOTED
    if fault == "other operation":
        return operation in COLLECTIVES or operation in WITHOUT_DATA or operation == "send and recv"
    if fault == "refused arguments":
        return operation in COLLECTIVES
    return True


def moments(fault: str, operation: str) -> list[str]:
    """When a fault can come."""
    if fault in ("kill", "stop"):
        return ["instead", "within", "anytime", "anytime"]
    if fault in ("pause", *OF_LINKS):
        return ["anytime"]
    if fault in ("exit", "abort"):
        return ["instead", "within"]
    if fault in ("exception", "destroy") and operation not in SYNCHRONOUS:
        return ["instead", "issued"]
    return ["instead"]

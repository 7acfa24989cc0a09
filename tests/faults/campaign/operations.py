"""Every operation of the campaign: how it is called, and what plain arithmetic says it must yield.

Tensors hold small whole numbers, so that sums have the same bits in whatever order they are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["SHOWN_AS", "Call", "perform", "prepare"]

AT_ONCE = 3  # asynchronous calls that are under way together
TAG = 5
PERIOD = 11
Pairs = list[tuple[Tensor, Tensor]]  # what came, and what must have come


@cache
def _pattern(elements: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, from which tensors are cut: making them anew takes longer than most calls."""
    return (torch.arange(elements + PERIOD) % PERIOD).to(dtype)


@dataclass(frozen=True)
class Call:
    """One member's side of one call.

    Attributes:
        group: the process group.
        members: its global ranks.
        me: this member's rank in the group.
        number: of the call, by which tensors of calls differ.
        elements: of each member's tensor.
        dtype: of the tensors.
        root: the group's rank that is the root, or the sender.
        reduction: of operations that have one.
        asynchronous: whether to use ``async_op``.
        timeout: of the group, in seconds, which some operations want again.
        mark: is called when the tensors are made and the operation begins.
    """

    group: Any
    members: tuple[int, ...]
    me: int
    number: int
    elements: int
    dtype: torch.dtype
    root: int
    reduction: Any = dist.ReduceOp.SUM
    asynchronous: bool = False
    timeout: float = 3.0
    mark: Callable[[], None] = lambda: None

    @property
    def size(self) -> int:
        return len(self.members)

    def of(self, member: int, other: int = 0) -> Tensor:
        """What a member gives to another, or to all."""
        start = (7 * member + 3 * other + 5 * self.number) % PERIOD
        return _pattern(self.elements, self.dtype)[start : start + self.elements].clone()

    def own(self) -> Tensor:
        return self.of(self.me)

    def empty(self, count: int = 1) -> Tensor:
        return torch.full((count * self.elements,), 99, dtype=self.dtype)

    def reduced(self, other: int = 0) -> Tensor:
        """The sum of all members' tensors (those for ``other``)."""
        total = self.of(0, other)
        for member in range(1, self.size):
            total += self.of(member, other)
        return total


@dataclass
class Prepared:
    """A call whose tensors are made.

    Attributes:
        go: calls; returns what is to be waited for, or a list of such.
        pairs: what came, and what must have come.
    """

    go: Callable[[], Any]
    pairs: Callable[[], Pairs] = list


def all_reduce(call: Call) -> Prepared:
    tensor = call.own()
    return Prepared(
        lambda: dist.all_reduce(tensor, call.reduction, call.group, async_op=call.asynchronous),
        lambda: [(tensor, call.reduced())],
    )


def all_reduce_coalesced(call: Call) -> Prepared:
    tensors = [call.own(), call.of(call.me, 1)]
    return Prepared(
        lambda: dist.all_reduce_coalesced(tensors, call.reduction, call.group, async_op=call.asynchronous),
        lambda: [(tensors[0], call.reduced()), (tensors[1], call.reduced(1))],
    )


def broadcast(call: Call) -> Prepared:
    tensor, root = call.own(), call.members[call.root]
    return Prepared(
        lambda: dist.broadcast(tensor, root, call.group, async_op=call.asynchronous),
        lambda: [(tensor, call.of(call.root))],
    )


def reduce(call: Call) -> Prepared:
    tensor, root = call.own(), call.members[call.root]
    return Prepared(
        lambda: dist.reduce(tensor, root, call.reduction, call.group, async_op=call.asynchronous),
        lambda: [(tensor, call.reduced())] if call.me == call.root else [],
    )


def all_gather(call: Call) -> Prepared:
    outs, own = [call.empty() for _ in call.members], call.own()
    return Prepared(
        lambda: dist.all_gather(outs, own, call.group, async_op=call.asynchronous),
        lambda: [(out, call.of(member)) for member, out in enumerate(outs)],
    )


def all_gather_single(call: Call) -> Prepared:
    out, own = call.empty(call.size), call.own()
    return Prepared(
        lambda: dist.all_gather_single(out, own, call.group, async_op=call.asynchronous),
        lambda: [(out, torch.cat([call.of(member) for member in range(call.size)]))],
    )


def gather(call: Call) -> Prepared:
    outs = [call.empty() for _ in call.members] if call.me == call.root else None
    own, root = call.own(), call.members[call.root]
    return Prepared(
        lambda: dist.gather(own, outs, root, call.group, async_op=call.asynchronous),
        lambda: [(out, call.of(member)) for member, out in enumerate(outs or [])],
    )


def scatter(call: Call) -> Prepared:
    ins = [call.of(call.me, member) for member in range(call.size)] if call.me == call.root else None
    out, root = call.empty(), call.members[call.root]
    return Prepared(
        lambda: dist.scatter(out, ins, root, call.group, async_op=call.asynchronous),
        lambda: [(out, call.of(call.root, call.me))],
    )


def reduce_scatter(call: Call) -> Prepared:
    out, ins = call.empty(), [call.of(call.me, member) for member in range(call.size)]
    return Prepared(
        lambda: dist.reduce_scatter(out, ins, call.reduction, call.group, async_op=call.asynchronous),
        lambda: [(out, call.reduced(call.me))],
    )


def reduce_scatter_single(call: Call) -> Prepared:
    out, whole = call.empty(), torch.cat([call.of(call.me, member) for member in range(call.size)])
    return Prepared(
        lambda: dist.reduce_scatter_single(
            out, whole, call.reduction, call.group, async_op=call.asynchronous
        ),
        lambda: [(out, call.reduced(call.me))],
    )


def all_to_all(call: Call) -> Prepared:
    ins = [call.of(call.me, member) for member in range(call.size)]
    outs = [call.empty() for _ in call.members]
    return Prepared(
        lambda: dist.all_to_all(outs, ins, call.group, async_op=call.asynchronous),
        lambda: [(out, call.of(member, call.me)) for member, out in enumerate(outs)],
    )


def all_to_all_single(call: Call) -> Prepared:
    whole = torch.cat([call.of(call.me, member) for member in range(call.size)])
    out = torch.empty_like(whole)
    return Prepared(
        lambda: dist.all_to_all_single(out, whole, group=call.group, async_op=call.asynchronous),
        lambda: [(out, torch.cat([call.of(member, call.me) for member in range(call.size)]))],
    )


def barrier(call: Call) -> Prepared:
    return Prepared(lambda: dist.barrier(call.group, async_op=call.asynchronous))


def monitored_barrier(call: Call) -> Prepared:
    return Prepared(lambda: dist.monitored_barrier(call.group, timeout=timedelta(seconds=call.timeout)))


def all_gather_object(call: Call) -> Prepared:
    found, own = [torch.empty(0)] * call.size, call.own()
    return Prepared(
        lambda: dist.all_gather_object(found, own, call.group),
        lambda: [(out, call.of(member)) for member, out in enumerate(found)],
    )


def broadcast_object_list(call: Call) -> Prepared:
    found = [call.own() if call.me == call.root else torch.empty(0)]
    return Prepared(
        lambda: dist.broadcast_object_list(found, call.members[call.root], call.group),
        lambda: [(found[0], call.of(call.root))],
    )


def send_and_recv(call: Call) -> Prepared:
    """One message from the root to the next member; nothing on the others."""
    receiver = (call.root + 1) % call.size
    if call.me == call.root:
        own = call.own()
        return Prepared(lambda: dist.send(own, call.members[receiver], call.group, TAG))
    if call.me != receiver:
        return Prepared(lambda: None)
    out = call.empty()

    def receive() -> None:
        dist.recv(out, call.members[call.root], call.group, TAG)

    return Prepared(receive, lambda: [(out, call.of(call.root))])


def ring(call: Call) -> Prepared:
    after, before = (call.me + 1) % call.size, (call.me - 1) % call.size
    own, out = call.own(), call.empty()

    def go() -> list[Any]:
        sent = dist.isend(own, call.members[after], call.group, TAG)
        return [dist.irecv(out, call.members[before], call.group, TAG), sent]

    return Prepared(go, lambda: [(out, call.of(before))])


def batch_isend_irecv(call: Call) -> Prepared:
    after, before = (call.me + 1) % call.size, (call.me - 1) % call.size
    out = call.empty()
    messages = [
        dist.P2POp(dist.isend, call.own(), call.members[after], call.group),
        dist.P2POp(dist.irecv, out, call.members[before], call.group),
    ]
    return Prepared(lambda: dist.batch_isend_irecv(messages), lambda: [(out, call.of(before))])


PREPARATIONS: dict[str, Callable[[Call], Prepared]] = {
    "all_reduce": all_reduce,
    "all_reduce_coalesced": all_reduce_coalesced,
    "broadcast": broadcast,
    "reduce": reduce,
    "all_gather": all_gather,
    "all_gather_single": all_gather_single,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter_single,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "barrier": barrier,
    "monitored_barrier": monitored_barrier,
    "all_gather_object": all_gather_object,
    "broadcast_object_list": broadcast_object_list,
    "send and recv": send_and_recv,
    "ring": ring,
    "batch_isend_irecv": batch_isend_irecv,
}
ALONE = ("monitored_barrier", "all_gather_object", "broadcast_object_list", "send and recv")
# What errors call an operation, where that is not its own name.
SHOWN_AS: dict[str, tuple[str, ...]] = {
    "all_reduce_coalesced": ("all_reduce",),
    "all_gather_single": ("all_gather",),
    "reduce_scatter_single": ("reduce_scatter",),
    "all_to_all_single": ("all_to_all",),
    "monitored_barrier": ("barrier",),
    "all_gather_object": ("all_gather",),
    "broadcast_object_list": ("broadcast",),
    "send and recv": ("send", "recv"),
    "ring": ("send", "recv"),
    "batch_isend_irecv": ("send", "recv"),
}


def prepare(operation: str, call: Call) -> Prepared:
    """Make the tensors of a call."""
    return PREPARATIONS[operation](call)


def perform(operation: str, call: Call) -> list[str]:
    """Call an operation, a few times at once where it is asynchronous; what is wrong with what came."""
    several = call.asynchronous and operation not in ALONE
    prepared = [prepare(operation, call) for _ in range(AT_ONCE if several else 1)]
    call.mark()
    works = [one.go() for one in prepared]
    for work in works:
        for part in work if isinstance(work, list) else [work]:
            if part is not None:
                part.wait()
    return [text for one in prepared for text in _differences(operation, call, one.pairs())]


def _differences(operation: str, call: Call, pairs: Pairs) -> list[str]:
    found = []
    for out, expected in pairs:
        if out.dtype != expected.dtype or not torch.equal(out, expected):
            found.append(
                f"call {call.number}, {operation}: {out.flatten()[:4]} is not {expected.flatten()[:4]}"
            )
    return found

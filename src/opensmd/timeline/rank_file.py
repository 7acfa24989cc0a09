"""Turning the frames that a rank has written into spans (see ``frames``); pure once the file is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opensmd.timeline.frames import CALL, KINDS, PART, Part, frames, stretches_of
from opensmd.timeline.span import COLLECTIVES, EXPECTED, MESSAGES, PIPELINE, Span

__all__ = ["RankFile", "read_rank_file"]

_MESSAGES = ("send", "recv", "recv_any_source")


@dataclass
class RankFile:
    """What one rank has recorded.

    Attributes:
        rank: its rank in the job.
        machine: the machine whose clock was used.
        wall_ns: the wall clock's time when that clock was zero.
        cut: whether only the beginning was recorded.
        spans: in the order of writing.
    """

    rank: int
    machine: str
    wall_ns: int
    cut: bool = False
    spans: list[Span] = field(default_factory=list)


def read_rank_file(path: Path) -> RankFile:
    """Read what one rank has recorded.

    Raises:
        ValueError: the file is no timeline of a rank.
    """
    rank_file = None
    reader = _Reader()
    try:
        for words, data in frames(path.read_bytes()):
            if rank_file is None:
                _, rank, machine, wall = words
                rank_file = RankFile(int(rank), machine, int(wall))
            elif words == ["cut"]:
                rank_file.cut = True
            else:
                rank_file.spans += reader.spans(words, data)
        if rank_file is None:
            raise ValueError("it does not begin as one")
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is not a rank's part of a timeline: {error}") from error
    return rank_file


@dataclass(frozen=True)
class _Group:
    """One of this rank's groups.

    Attributes:
        key: the same on all of its ranks, and unique.
        ranks: the global ranks, by rank in the group.
    """

    key: str
    ranks: tuple[int, ...]


class _Reader:
    """Remembers what earlier frames have said."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._names: Counter[tuple[int, str]] = Counter()
        self._operations: dict[int, str] = {}
        self._expected: dict[int, list[Part]] = {}
        self._kinds: dict[str, Callable[[list[str], bytes], Iterator[Span]]] = {
            "group": self._group,
            "operation": self._operation,
            "calls": self._calls,
            "lost": self._lost,
            "expected": self._expect,
            "step": self._step,
        }

    def spans(self, words: list[str], data: bytes) -> Iterator[Span]:
        return self._kinds[words[0]](words[1:], data)

    def _group(self, values: list[str], data: bytes) -> Iterator[Span]:
        number, name, ranks = values
        members = tuple(map(int, ranks.split(",")))
        # Names are reused, alike on all members: later, and concurrently in groups without common ranks.
        generation = self._names[members[0], name]
        self._names[members[0], name] += 1
        self._groups[int(number)] = _Group(f"{members[0]}.{generation}/{name}", members)
        return iter(())

    def _operation(self, values: list[str], data: bytes) -> Iterator[Span]:
        self._operations[int(values[0])] = values[1]
        return iter(())

    def _calls(self, values: list[str], data: bytes) -> Iterator[Span]:
        for start, end, size, sequence, number, peer, operation, _ in CALL.iter_unpack(data):
            name, group = self._operations[operation], self._groups.get(number)
            if name in _MESSAGES:
                yield Span(MESSAGES, _message_name(name, peer, group), start, end, bytes=size)
            else:
                call = f"{group.key}/{sequence}" if group else ""
                yield Span(COLLECTIVES, name, start, end, call=call, bytes=size)

    def _lost(self, values: list[str], data: bytes) -> Iterator[Span]:
        count, at = map(int, values)
        yield Span(COLLECTIVES, f"{count} more, not recorded", at, at)

    def _expect(self, values: list[str], data: bytes) -> Iterator[Span]:
        parts = PART.iter_unpack(data)
        self._expected[int(values[0])] = [
            (index, KINDS[kind], begin, end) for index, kind, begin, end in parts
        ]
        return iter(())

    def _step(self, values: list[str], data: bytes) -> Iterator[Span]:
        done = [
            Span(PIPELINE, kind, start, end, microbatch)
            for microbatch, kind, start, end in stretches_of(data)
        ]
        yield from done
        yield from _expected(done, self._expected.get(int(values[0]), []))


def _message_name(operation: str, peer: int, group: _Group | None) -> str:
    """Return the name of a message as shown; NCCL's targets are unknown."""
    words = ("send", "to") if operation == "send" else ("recv", "from")
    if peer < 0 or group is None:
        return words[0]
    return f"{words[0]} {words[1]} rank {group.ranks[peer]}"


def _expected(done: list[Span], parts: list[Part]) -> Iterator[Span]:
    """Return what a plan expects, scaled to the rank's work in a step."""
    planned = sum(end - begin for _, _, begin, end in parts)
    worked = sum(span.end_ns - span.start_ns for span in done if span.name != "wait")
    for index, kind, begin, end in parts if done else []:
        start_ns, end_ns = (done[0].start_ns + round(at * worked / planned) for at in (begin, end))
        yield Span(EXPECTED, kind, start_ns, end_ns, index)

"""What identifies a message between the ranks of a pipeline: its sender, and a tag that both ends compute.

A tag consists of the kind of the message, the microbatch, the number of the intercepted call, and a few check
bits::

    kind | microbatch, 10 bits | number, 16 bits | check, 10 bits

All of these follow from the program, which all ranks run alike, so nobody needs to ask what a message is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = [
    "ABORT",
    "Kind",
    "Message",
    "SentTensor",
    "gradient_messages",
    "gradient_tag",
    "make_tag",
    "no_gradient_tag",
    "sent_tensors",
    "short_tag",
]

Message = tuple[int, int]  # (pipeline rank of the sender, tag)

_MICROBATCH_BITS, _NUMBER_BITS, _CHECK_BITS = 10, 16, 10


class Kind:
    """What a message carries; part of its tag."""

    TENSOR, GRADIENT, NO_GRADIENT, OBJECT, DESCRIPTION, RESULT, ABORT = range(7)


def make_tag(kind: int, microbatch: int, number: int, check: int = 0) -> int:
    """Return a tag of 39 bits. Numbers may wrap around, because messages with the same tag stay in order."""
    tag = kind << _MICROBATCH_BITS | (microbatch & ((1 << _MICROBATCH_BITS) - 1))
    tag = tag << _NUMBER_BITS | (number & ((1 << _NUMBER_BITS) - 1))
    return tag << _CHECK_BITS | (check & ((1 << _CHECK_BITS) - 1))


ABORT = make_tag(Kind.ABORT, 0, 0)
_TENSOR_TO_GRADIENT = make_tag(Kind.GRADIENT, 0, 0) - make_tag(Kind.TENSOR, 0, 0)
_GRADIENT_TO_NONE = make_tag(Kind.NO_GRADIENT, 0, 0) - make_tag(Kind.GRADIENT, 0, 0)


def gradient_tag(tag: int) -> int:
    """Return the tag of the gradient of a message of kind TENSOR."""
    return tag + _TENSOR_TO_GRADIENT


def gradient_messages(source: int, tag: int) -> list[Message]:
    """Return the two messages of which one brings a gradient."""
    return [(source, tag), (source, no_gradient_tag(tag))]


def no_gradient_tag(tag: int) -> int:
    """Return the tag of the "no gradient" message that replaces the gradient with ``tag``."""
    return tag + _GRADIENT_TO_NONE


def short_tag(tag: int) -> int:
    """Shorten a tag to the 29 bits available between hosts, except two reserved values; torch's have 31.

    Messages with the same tag stay in order, so tags may coincide.
    """
    return tag % ((1 << 29) - 3)


class SentTensor(NamedTuple):
    """A sent tensor or gradient: when (``time.perf_counter_ns()``), to which rank, and whose."""

    at_ns: int
    target: int
    microbatch: int


def sent_tensors(sent: Iterable[tuple[int, int, int]]) -> list[SentTensor]:
    """Select the messages (time, target, tag) that carry tensors and gradients."""
    tensors = []
    for at, target, tag in sent:
        of_kind, microbatch = divmod(tag >> (_NUMBER_BITS + _CHECK_BITS), 1 << _MICROBATCH_BITS)
        if of_kind in (Kind.TENSOR, Kind.GRADIENT):
            tensors.append(SentTensor(at, target, microbatch))
    return tensors

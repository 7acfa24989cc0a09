"""Bytes of a pipe into lines: pure, so that prefixes never land inside a line or a character.

A progress bar rewrites its line with carriage returns; such a rewrite is a segment of its own that ends with
``\\r``, and the console decides whether to show it.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

__all__ = ["LineAssembler", "Segment"]

_ENDS = re.compile(r"(\r\n|\n|\r)")


@dataclass(frozen=True)
class Segment:
    """A piece of output: ``end`` is ``"\\n"`` for a line, ``"\\r"`` for a rewrite, ``""`` for a rest."""

    text: str
    end: str


class LineAssembler:
    """Collects one stream's bytes and gives whole segments out; what is not UTF-8 stays as it is."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._rest = ""

    def feed(self, data: bytes) -> list[Segment]:
        """Add bytes; return the segments they complete."""
        text = self._rest + self._decoder.decode(data)
        # A carriage return at the very end may be the first half of \r\n.
        held = "\r" if text.endswith("\r") else ""
        parts = _ENDS.split(text[: len(text) - len(held)])
        self._rest = parts[-1] + held
        ends = ["\n" if end == "\r\n" else end for end in parts[1::2]]
        return [Segment(text, end) for text, end in zip(parts[:-1:2], ends, strict=True)]

    @property
    def waiting(self) -> bool:
        """True if an unfinished line is held."""
        return bool(self._rest)

    def take_rest(self) -> Segment:
        """Give the unfinished line out."""
        text = (self._rest + self._decoder.decode(b"", final=True)).rstrip("\r")
        self._rest = ""
        self._decoder.reset()
        return Segment(text, "")

"""Splitting a pipe's bytes into lines, so that prefixes never land inside a line or a character; pure.

A progress bar rewrites its line with carriage returns. Each rewrite is a segment that ends with ``\\r``, and
the console decides whether to show it.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

__all__ = ["LineAssembler", "Segment"]

_ENDS = re.compile(r"([\n\r])")
LONGEST = 1 << 20  # characters of a line that are held until its end


@dataclass(frozen=True)
class Segment:
    """A piece of output: ``end`` is ``"\\n"`` for a line, ``"\\r"`` for a rewrite, ``""`` for a part."""

    text: str
    end: str


class LineAssembler:
    """Collects one stream's bytes and returns whole segments; bytes that are not UTF-8 are preserved.

    Extremely long lines, such as a file without line breaks, come in parts.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._parts: list[str] = []  # parts of the unfinished line, joined once it ends
        self._length = 0  # their total length
        self._held = ""  # a carriage return at the end, perhaps the first half of \r\n

    def feed(self, data: bytes) -> list[Segment]:
        """Add bytes; return the segments they complete."""
        text = self._held + self._decoder.decode(data)
        self._held = "\r" if text.endswith("\r") else ""
        begun, *others = _ENDS.split(text[: len(text) - len(self._held)].replace("\r\n", "\n"))
        self._hold(begun)
        segments = []
        for end, following in zip(others[::2], others[1::2], strict=True):
            segments.append(Segment(self._joined(), end))
            self._hold(following)
        if self._length > LONGEST:
            segments.append(Segment(self._joined(), ""))
        return segments

    @property
    def waiting(self) -> bool:
        """Whether an unfinished line is held."""
        return bool(self._held) or self._length > 0

    def take_rest(self) -> Segment:
        """Return the unfinished line."""
        text = self._joined() + self._decoder.decode(b"", final=True)
        self._held = ""
        self._decoder.reset()
        return Segment(text, "")

    def _hold(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)

    def _joined(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        self._length = 0
        return text

"""Which room of a file is free: the book that an arena keeps, without the file."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["FreeSpace"]


class FreeSpace:
    """Free ranges of offsets, each joined with what is free beside it."""

    def __init__(self) -> None:
        self._by_start: list[tuple[int, int]] = []  # start and end
        self._by_size: list[tuple[int, int]] = []  # size and start

    def take(self, size: int) -> int | None:
        """Return the start of ``size`` bytes that are no longer free; None if no range is large enough.

        They begin the smallest range that is, so that batches of many lengths leave the large ones whole.
        """
        index = bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            return None
        length, start = self._by_size[index]
        self._remove(start, start + length)
        if size < length:
            self._insert(start + size, start + length)
        return start

    def take_last(self, end: int) -> int | None:
        """Return the start of the range that ends at ``end``, which is no longer free; None without one."""
        if not self._by_start or self._by_start[-1][1] != end:
            return None
        start, _ = self._by_start[-1]
        self._remove(start, end)
        return start

    def add(self, start: int, end: int) -> None:
        """Free a range."""
        index = bisect_left(self._by_start, (start, end))
        before, after = self._by_start[index - 1 : index], self._by_start[index : index + 1]
        for neighbour in (*before, *after):
            if neighbour[1] == start or neighbour[0] == end:
                self._remove(*neighbour)
                start, end = min(start, neighbour[0]), max(end, neighbour[1])
        self._insert(start, end)

    def _insert(self, start: int, end: int) -> None:
        insort(self._by_start, (start, end))
        insort(self._by_size, (end - start, start))

    def _remove(self, start: int, end: int) -> None:
        del self._by_start[bisect_left(self._by_start, (start, end))]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]

"""The CRC-32 of bytes in a row, from those of its parts; pure.

Python's zlib has no such function before 3.15. The method is that of zlib's own ``crc32_combine``: appending
n bytes multiplies a checksum by x**(8 * n), modulo the polynomial that CRC-32 is made of.
"""

from __future__ import annotations

import functools

__all__ = ["combined"]

_POLYNOMIAL = 0xEDB88320  # as all numbers here, with the bit of x**0 first
_ONE = 1 << 31
_X = 1 << 30


def combined(first: int, second: int, length: int) -> int:
    """The checksum of bytes that have ``first`` and, behind them, ``length`` bytes that have ``second``."""
    return _product(_appended(length), first) ^ second


@functools.lru_cache(maxsize=1024)
def _appended(length: int) -> int:
    """What a checksum is multiplied by where so many bytes follow."""
    power, square, bits = _ONE, _X, 8 * length
    while bits:
        if bits & 1:
            power = _product(square, power)
        square = _product(square, square)
        bits >>= 1
    return power


def _product(one: int, other: int) -> int:
    found, bit = 0, _ONE
    while bit:
        if one & bit:
            found ^= other
        bit >>= 1
        other = other >> 1 ^ _POLYNOMIAL if other & 1 else other >> 1
    return found

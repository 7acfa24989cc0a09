"""The CRC-32 of concatenated bytes, computed from those of the parts; pure.

Python's zlib has no such function before 3.15. The method is that of zlib's ``crc32_combine``: appending n
bytes multiplies a checksum by x**(8 * n), modulo the polynomial of CRC-32.
"""

from __future__ import annotations

import functools

__all__ = ["combined"]

_POLYNOMIAL = 0xEDB88320  # like all numbers here, with the coefficient of x**0 in the highest bit
_ONE = 1 << 31
_X = 1 << 30


def combined(first: int, second: int, length: int) -> int:
    """Return the checksum of bytes with checksum ``first`` followed by ``length`` bytes with ``second``."""
    return _product(_appended(length), first) ^ second


@functools.lru_cache(maxsize=1024)
def _appended(length: int) -> int:
    """Return the factor by which so many appended bytes multiply a checksum."""
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

"""Checksums of bytes in a row are those that zlib computes of all of them."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from opensmd.modelparallel.checkpoint.checksum import combined


@given(st.binary(), st.binary())
def test_the_checksum_of_two_parts_is_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_the_order_in_which_parts_are_combined_changes_nothing() -> None:
    one, length = zlib.crc32(bytes(1 << 20)), 1 << 20
    doubled, whole = one, one
    for _ in range(12):  # up to 4 GiB, whose length has more than 32 bits
        doubled = combined(doubled, doubled, length)
        length *= 2
    for _ in range((1 << 12) - 1):
        whole = combined(whole, one, 1 << 20)
    assert doubled == whole and length == 1 << 32

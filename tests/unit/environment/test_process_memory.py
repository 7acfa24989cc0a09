"""What a process has of its own, and that what is freed leaves it."""

from __future__ import annotations

from opensmd.environment.process_memory import anonymous_bytes, give_back_freed

MANY, SMALL = 4096, 8192  # blocks, and bytes of each: glibc keeps these when they are freed


def test_freed_blocks_are_given_back() -> None:
    give_back_freed()  # or the blocks would go where earlier tests' were
    before = anonymous_bytes()
    blocks = [b"1" * SMALL for _ in range(MANY)]
    held = anonymous_bytes()
    assert before > 0 and held - before > MANY * SMALL // 2
    blocks.clear()
    assert give_back_freed()
    assert anonymous_bytes() < held - MANY * SMALL // 2

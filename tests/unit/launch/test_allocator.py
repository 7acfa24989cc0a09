"""Which variables make ranks keep memory."""

from __future__ import annotations

import pytest

from opensmd.launch.allocator import chosen_by_user, keeping_memory

DEBIAN_12 = ("glibc", "2.36")


def test_large_blocks_come_from_the_heap_and_stay_there() -> None:
    assert keeping_memory({"PATH": "/bin"}, DEBIAN_12) == {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
        "MALLOC_ARENA_MAX": "1",
        "OPENSMD_KEEP_TENSORS": "1",
    }


def test_threads_have_one_heap_unless_the_user_wants_more() -> None:
    assert keeping_memory({"MALLOC_ARENA_MAX": "4"}, DEBIAN_12)["MALLOC_ARENA_MAX"] == "4"


def test_older_versions_get_a_threshold_that_they_take() -> None:
    assert keeping_memory({}, ("glibc", "2.31"))["MALLOC_MMAP_THRESHOLD_"] == str(32 << 20)


@pytest.mark.parametrize(
    "name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"]
)
def test_what_the_user_has_chosen_is_left_alone(name: str) -> None:
    assert chosen_by_user({name: "1"}) == name
    assert keeping_memory({name: "1"}, DEBIAN_12) == {}
    assert keeping_memory({name: ""}, DEBIAN_12) != {}


def test_other_c_libraries_get_nothing() -> None:
    assert keeping_memory({}, ("", "")) == {}

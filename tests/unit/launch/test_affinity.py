"""Which cores which rank gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.launch.affinity import (
    chosen_by_user,
    parse_list,
    physical_cores,
    read_siblings,
    share,
    threads_per_rank,
)

PLAIN = [(0,), (1,), (2,), (3,)]
THREADED = [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        (PLAIN, 2, [(0, 1), (2, 3)]),
        (PLAIN, 4, [(0,), (1,), (2,), (3,)]),
        (THREADED, 2, [(0, 4, 1, 5), (2, 6, 3, 7)]),
        (THREADED, 3, [(0, 4), (1, 5), (2, 6)]),
        (PLAIN[:2], 4, [(0,), (0,), (1,), (1,)]),
        (PLAIN[:1], 2, [(0,), (0,)]),
        (PLAIN[:2], 3, [None, None, None]),
        ([], 1, [None]),
    ],
)
def test_cores_are_dealt_out_evenly_or_not_at_all(
    cores: list[tuple[int, ...]], ranks: int, expected: list[tuple[int, ...] | None]
) -> None:
    assert [share(cores, rank, ranks) for rank in range(ranks)] == expected


def test_hardware_threads_of_one_core_stay_together() -> None:
    siblings = {0: (0, 4), 1: (1, 5), 4: (0, 4), 5: (1, 5)}
    assert physical_cores([0, 1, 4, 5], siblings) == [(0, 4), (1, 5)]


def test_cpus_outside_the_mask_are_not_used() -> None:
    assert physical_cores([4, 5], {4: (0, 4), 5: (1, 5)}) == [(4,), (5,)]


def test_threads_follow_the_cores() -> None:
    assert [threads_per_rank(4, ranks) for ranks in (1, 2, 3, 4, 8)] == [4, 2, 1, 1, 1]


def test_an_openmp_affinity_of_the_users_is_noticed() -> None:
    assert chosen_by_user({"OMP_PROC_BIND": "close"}) == "OMP_PROC_BIND"
    assert chosen_by_user({"OMP_PROC_BIND": "", "OMP_NUM_THREADS": "2"}) is None


def test_the_kernels_topology_files_are_read(tmp_path: Path) -> None:
    topology = tmp_path / "cpu2" / "topology"
    topology.mkdir(parents=True)
    (topology / "thread_siblings_list").write_text("2,6\n")
    assert read_siblings([2, 3], str(tmp_path)) == {2: (2, 6)}
    assert parse_list("0-2,8\n") == (0, 1, 2, 8)

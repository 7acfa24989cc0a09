"""What members of a group tell each other through a store, also one that other groups have used."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistBackendError, HashStore

from opensmd.collectives.exchange import Exchange
from opensmd.environment import siblings
from tests.support.patience import PATIENCE


def names_of(store: HashStore, ranks: Sequence[int]) -> list[list[str]]:
    """What each member hears from all."""

    def one(place: int) -> list[str]:
        exchange = Exchange(store, place, ranks, timeout=timedelta(seconds=PATIENCE), group="g")
        return exchange.all_gather("name", f"{place} of {ranks}")

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, range(len(ranks))))


def test_groups_of_one_name_may_follow_each_other_with_other_members_and_sizes() -> None:
    store = HashStore()
    for ranks in ([0, 1], [0, 1, 2, 3], [2, 3], [0, 1], [0, 1, 2], [0, 1, 2]):
        wanted = [f"{place} of {ranks}" for place in range(len(ranks))]
        assert names_of(store, ranks) == [wanted] * len(ranks)


def test_nobody_leaves_a_meeting_before_all_have_come() -> None:
    store, came = HashStore(), []

    def one(place: int) -> int:
        exchange = Exchange(store, place, range(4), timeout=timedelta(seconds=PATIENCE), group="g")
        came.append(place)
        exchange.meet("here")
        return len(came)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(one, range(4))) == [4] * 4


def test_a_rank_of_smdrun_that_ended_before_it_joined_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (1, 0):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv(siblings.REPORT, str(tmp_path / str(rank) / "error.json"))
        siblings.note_process(world_size=2)
    note = tmp_path / "1" / "process"
    ended = subprocess.Popen(["true"])
    ended.wait()
    note.write_text(note.read_text().replace(f"{os.getpid()} ", f"{ended.pid} "))
    exchange = Exchange(HashStore(), 0, (0, 1), timeout=timedelta(seconds=PATIENCE), group="g")
    with pytest.raises(DistBackendError, match=r": rank 1 will not join \(its process has died\)"):
        exchange.meet("here")

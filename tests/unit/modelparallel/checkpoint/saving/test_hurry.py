"""Ranks tell each other through the job's store that somebody waits for a save."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from opensmd.modelparallel.checkpoint.saving import hurry
from opensmd.modelparallel.checkpoint.saving.hurry import Hurry
from tests.support.patience import PATIENCE


def group(name: str = "saves", ranks: int = 2) -> Any:
    return SimpleNamespace(size=lambda: ranks, group_name=name)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    made = HashStore()
    monkeypatch.setattr(hurry, "default_store", lambda: made)
    monkeypatch.setattr(hurry, "ANSWER", PATIENCE)
    return made


def test_all_ranks_see_that_one_waits() -> None:
    one, other = Hurry(group(), 1), Hurry(group(), 1)
    assert not one.is_wanted() and not other.is_wanted()
    other.want()
    assert one.is_wanted() and other.is_wanted()


def test_the_next_save_is_another_one_and_so_are_those_of_another_job() -> None:
    Hurry(group(), 1).want()
    assert not Hurry(group(), 2).is_wanted() and not Hurry(group("others"), 1).is_wanted()
    Hurry(group(), 2).want()
    assert Hurry(group(), 2).is_wanted()


def test_a_store_that_is_gone_is_no_error() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hurry, "default_store", Gone)
        lost = Hurry(group(), 1)
    lost.want()
    assert not lost.is_wanted()


def test_a_store_that_does_not_answer_keeps_nobody_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    class Stopped:
        def set(self, key: str, value: str) -> None:
            asked.wait()

        def check(self, keys: list[str]) -> bool:
            asked.wait()
            return False

    monkeypatch.setattr(hurry, "ANSWER", 0.01)
    monkeypatch.setattr(hurry, "default_store", Stopped)
    silent = Hurry(group(), 1)
    silent.want()
    assert silent.silence().endswith("does not answer")
    asked.set()


def test_a_store_that_answers_is_not_named() -> None:
    assert Hurry(group(), 1).silence() == ""


def test_a_rank_alone_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hurry, "default_store", None)
    alone = Hurry(group(ranks=1), 1)
    alone.want()
    assert not alone.is_wanted() and alone.silence() == ""

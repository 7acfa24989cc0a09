"""What smdrun refuses before it starts anything, and what it makes of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opensmd.launch import options
from opensmd.launch.options import Options


def read(**given: Any) -> Options:
    defaults: dict[str, Any] = {"script": "train.py", "nnodes": 1, "node_rank": 0, "master_addr": None}
    defaults |= {"python": True, "module": False, "device": "cpu", "elastic_replicas": None}
    defaults |= {"ranks": 4, "channel": [], "mp_parameters": None, "standalone": False}
    return Options.from_command_line(**defaults | given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"elastic_replicas": 3}, "the 4 ranks cannot be shared out evenly"),
        ({"elastic_replicas": 3, "nnodes": 2, "master_addr": "a"}, "as many whole replicas"),
        ({"nnodes": 2}, "--nnodes 2 needs --master-addr"),
        ({"nnodes": 2, "master_addr": "a", "standalone": True}, "--standalone is a job on one host"),
        ({"nnodes": 2, "master_addr": "a", "node_rank": 2}, "--node-rank 2 is outside 0..1"),
        ({"python": False}, "--no-python runs a program as it is"),
        ({"python": False, "device": "auto", "module": True}, "--no-python runs a program as it is"),
        ({"channel": ["training"]}, "expected NAME=PATH"),
    ],
)
def test_what_cannot_be_done_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(**given)


def test_channels_are_folders_by_name_and_a_path_may_have_an_equals_sign() -> None:
    found = read(channel=["training=data/train", "extra=a=b"]).channels
    assert found == {"training": Path("data/train"), "extra": Path("a=b")}


def test_mp_parameters_are_read_as_json() -> None:
    assert read(mp_parameters='{"microbatches": 4}').mp_parameters == {"microbatches": 4}


@pytest.mark.parametrize(
    ("cores", "quota", "ranks"), [(3, None, 3), (64, None, options.MOST_RANKS), (64, 2.0, 2)]
)
def test_without_a_number_there_is_a_rank_for_each_core_as_many_as_a_container_has_at_most(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float | None, ranks: int
) -> None:
    monkeypatch.setattr(options.affinity, "local_cores", lambda: list(range(cores)))
    monkeypatch.setattr(options, "cpu_quota", lambda: quota)
    assert read(ranks=None).ranks == ranks

"""A rank that dies in the middle of a job: what waits for it fails at once and says so."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed.deprecated as dist

from tests.support.patience import PATIENCE
from tests.support.ranks import run_once


def others_have_joined(rank: int) -> None:
    """On that rank: wait until the others have left the call that joins them."""
    if dist.get_rank() != rank:
        dist.send(torch.ones(1), rank)
        return
    for other in {*range(dist.get_world_size())} - {rank}:
        dist.recv(torch.ones(1), other)


def rank_one_dies(path: str) -> tuple[str, float, str]:
    os.environ["OPENSMD_LEGACY_ENGINE"] = "gloo"
    dist.init_process_group("tcp", f"file://{path}", rank=int(os.environ["RANK"]), world_size=3)
    others_have_joined(1)
    if dist.get_rank() == 1:
        dist.send(torch.ones(3), 0)
        os._exit(9)
    tensor = torch.zeros(3)
    if dist.get_rank() == 0:
        dist.recv(tensor, 1)  # what was sent before the end still comes
        assert tensor.tolist() == [1, 1, 1]
    started = time.monotonic()
    texts = []
    for call in (lambda: dist.recv(tensor, 1), lambda: dist.all_reduce(tensor)):
        try:
            call()
        except RuntimeError as error:
            texts.append(str(error))
    return texts[0], time.monotonic() - started, texts[1]


def test_a_dead_rank_is_named_to_who_waits_for_it(tmp_path: Path) -> None:
    outcomes = run_once(3, rank_one_dies, str(tmp_path / "meet"), backend=None)
    for rank in (0, 2):
        text, seconds, collective = outcomes[rank].value
        assert f"recv on rank {rank}: rank 1 has closed its connection" in text
        assert f"all_reduce on rank {rank} of 3" in collective
        assert seconds < PATIENCE / 2  # at once, not at the timeout of half an hour

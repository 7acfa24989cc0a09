"""Which engine carries a job's data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from opensmd.legacy import api
from opensmd.legacy.rendezvous.host import Process
from opensmd.legacy.transports.engine import choose_engine

HERE = Process(100, 1.0, "host", "space", "space")


def test_smddp_carries_where_all_share_a_host_and_have_its_core() -> None:
    there = replace(HERE, pid_space="another")
    assert choose_engine("auto", [HERE, HERE], [True, True]) == "smddp"
    assert choose_engine("auto", [HERE, there], [True, True]) == "gloo"
    assert choose_engine("auto", [HERE, HERE], [True, False]) == "gloo"
    assert choose_engine("gloo", [HERE, HERE], [True, True]) == "gloo"
    assert choose_engine("smddp", [HERE, there], [True, True]) == "smddp"
    with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] cannot load"):
        choose_engine("smddp", [HERE, HERE], [True, False])


def test_nccl_without_cuda_says_what_else_there_is() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA, where nccl can start")
    with pytest.raises(RuntimeError, match=r"nccl.*CUDA.*tcp or gloo"):
        api.init_process_group("nccl", "tcp://127.0.0.1:1", rank=0, world_size=1)

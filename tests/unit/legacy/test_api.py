"""The functions before a group exists."""

from __future__ import annotations

import pytest

import opensmd.legacy as dist
from opensmd.legacy import api


def test_before_init_there_is_no_rank_and_bad_arguments_are_told_apart() -> None:
    assert api.is_available() and not api.is_initialized()
    assert (dist._backend, dist._initialized) == (dist.dist_backend.UNDEFINED, 0)
    assert not hasattr(dist, "_scope")
    for call in (api.get_rank, api.get_world_size, api.barrier, api.new_group):
        with pytest.raises(AssertionError, match="init_process_group"):
            call()
    with pytest.raises(AssertionError, match=r"unexpected keyword.*timeout"):
        api.init_process_group("tcp", timeout=3)
    with pytest.raises(RuntimeError, match="Invalid distributed backend name: avian"):
        api.init_process_group("avian")
    with pytest.raises(ValueError, match="unknown init method"):
        api.init_process_group("tcp", "carrier://pigeon")
    with pytest.raises(ValueError, match="the rank must be given by hand"):
        api.init_process_group("tcp", "tcp://127.0.0.1:1", world_size=2)
    with pytest.raises(ValueError, match="world_size is -1"):
        api.init_process_group("tcp", "file:///tmp/x")
    with pytest.raises(ValueError, match="group_name='a' is not supported with env"):
        api.init_process_group("tcp", group_name="a")
    with pytest.raises(RuntimeError, match=r"torch\.distributed\.rpc"):
        api.init_master_worker("tcp")
    assert not api.is_initialized()

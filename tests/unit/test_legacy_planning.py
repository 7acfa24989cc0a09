"""Who gets which rank, whose store is used, which engine carries: pure decisions, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opensmd.legacy import api
from opensmd.legacy.capability import check_tensors
from opensmd.legacy.launch import _parser, command_of, environment_of
from opensmd.legacy.parallel.flat import copy_back, flatten, in_buckets
from opensmd.legacy.rendezvous.host import Process
from opensmd.legacy.rendezvous.multicast import Announcement, choose_leader
from opensmd.legacy.rendezvous.roster import Member, assign_ranks, contradiction, missing_ranks
from opensmd.legacy.transports.engine import choose_engine

HERE = Process(100, 1.0, "host", "space", "space")


def members(*ranks: int, world_size: int | None = None) -> list[Member]:
    size = len(ranks) if world_size is None else world_size
    return [Member(replace(HERE, pid=100 + index), rank, size) for index, rank in enumerate(ranks)]


@given(st.integers(1, 8).flatmap(lambda n: st.permutations(range(n))), st.data())
def test_every_process_gets_its_own_rank_and_the_one_it_asked_for(
    order: list[int], data: st.DataObject
) -> None:
    wanted = [rank if data.draw(st.booleans()) else -1 for rank in order]
    roster = members(*wanted)
    assert contradiction(roster) is None
    given_ranks = assign_ranks(roster)
    assert sorted(given_ranks) == list(range(len(order)))
    assert all(want in (-1, got) for want, got in zip(wanted, given_ranks, strict=True))
    free = [got for want, got in zip(wanted, given_ranks, strict=True) if want == -1]
    assert free == sorted(free), "those who asked for none are served in order of arrival"


def test_what_contradicts_is_named_with_both_processes() -> None:
    twice = contradiction(members(0, 1, 1))
    assert twice is not None and "rank 1 was taken twice, by process 101 on host and process 102" in twice
    assert "asks for rank 5; expected 0 to 2" in str(contradiction(members(0, 5, 1)))
    unequal = [*members(0, world_size=2), *members(1, world_size=3)]
    assert "world_size 2" in str(contradiction(unequal)) and "with 3" in str(contradiction(unequal))


def test_who_is_missing_is_said_as_exactly_as_can_be() -> None:
    assert missing_ranks(members(0, 2, world_size=4), 4) == "ranks 1, 3"
    assert missing_ranks(members(1, world_size=2), 2) == "rank 0"
    assert missing_ranks(members(-1, 2, world_size=4), 4) == "2 processes"
    assert missing_ranks(members(-1, world_size=2), 2) == "one process"


def test_a_member_and_a_process_survive_the_store() -> None:
    member = Member(Process.this(), 3, 4)
    assert Member.from_json(member.to_json()) == member
    assert not member.process.is_known_dead()
    assert replace(member.process, born=member.process.born - 1000).is_known_dead(), "a pid can be used again"
    assert not replace(member.process, pid=2**22 + 1, pid_space="another host").is_known_dead()


def heard(*tokens: str, leader: str = "", world_size: int = 2) -> dict[str, Announcement]:
    return {token: Announcement(token, world_size, "", leader) for token in tokens}


def test_all_go_to_the_smallest_token_once_enough_were_heard() -> None:
    assert choose_leader(heard("b"), heard("b")["b"]) is None
    everyone = heard("b", "a")
    assert choose_leader(everyone, everyone["b"]) == everyone["a"]


def test_who_comes_too_late_follows_the_others_instead_of_splitting_them() -> None:
    others = heard("c", "b", leader="b")
    mine = heard("a")
    leader = choose_leader({**others, **mine}, mine["a"])
    assert leader is not None and leader.token == "b"


def test_another_world_size_is_reason_enough_to_meet() -> None:
    both = {**heard("a", world_size=3), **heard("b", world_size=4)}
    assert choose_leader(both, both["b"]) == both["a"]


def test_smddp_carries_where_all_share_a_host_and_have_its_core() -> None:
    there = replace(HERE, pid_space="another")
    assert choose_engine("auto", [HERE, HERE], [True, True]) == "smddp"
    assert choose_engine("auto", [HERE, there], [True, True]) == "gloo"
    assert choose_engine("auto", [HERE, HERE], [True, False]) == "gloo"
    assert choose_engine("gloo", [HERE, HERE], [True, True]) == "gloo"
    assert choose_engine("smddp", [HERE, there], [True, True]) == "smddp"
    with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] cannot load"):
        choose_engine("smddp", [HERE, HERE], [True, False])


def test_nccl_refuses_cpu_tensors_and_names_who_takes_them() -> None:
    for function in ("send", "all_reduce", "gather"):
        with pytest.raises(
            RuntimeError, match=f"DataChannelNccl does not support {function} of cpu tensors.*tcp, gloo, mpi"
        ):
            check_tensors("nccl", function, [torch.zeros(1)])
        for backend in ("tcp", "gloo", "mpi"):
            check_tensors(backend, function, [torch.zeros(1)])


def test_what_is_no_tensor_is_refused_by_name() -> None:
    not_a_tensor: Any = 1
    with pytest.raises(TypeError, match=r"all_reduce: expected a torch\.Tensor, got 1"):
        check_tensors("tcp", "all_reduce", [not_a_tensor])


def test_before_init_there_is_no_rank_and_bad_arguments_are_told_apart() -> None:
    assert api.is_available() and not api.is_initialized()
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


def test_nccl_without_cuda_says_what_else_there_is() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA, where nccl can start")
    with pytest.raises(RuntimeError, match=r"nccl.*CUDA.*tcp or gloo"):
        api.init_process_group("nccl", "tcp://127.0.0.1:1", rank=0, world_size=1)


def test_the_launcher_writes_command_lines_and_environments_as_documented() -> None:
    options = _parser().parse_args(
        [
            "--nnodes=2",
            "--node_rank=1",
            "--nproc_per_node=4",
            "--master_addr=10.0.0.1",
            "train.py",
            "--lr",
            "1",
        ]
    )
    assert command_of(options, 3)[1:] == ["-u", "train.py", "--local_rank=3", "--lr", "1"]
    environment = environment_of(options, 3, {"HOME": "/root", "RANK": "77"})
    assert environment == {
        "HOME": "/root",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "8",
        "RANK": "7",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "OMP_NUM_THREADS": "1",
    }
    kept = environment_of(options, 0, {"OMP_NUM_THREADS": "3"})
    assert kept["OMP_NUM_THREADS"] == "3"


def test_buckets_hold_one_dtype_and_stay_below_their_limit() -> None:
    tensors = [torch.ones(4), torch.ones(2).double(), torch.full((3, 2), 2.0), torch.ones(100), torch.ones(1)]
    buckets = in_buckets(tensors, 40)
    assert [[each.numel() for each in bucket] for bucket in buckets] == [[4, 6], [100], [1], [2]]
    flat = flatten(buckets[0])
    assert flat.tolist() == [1.0] * 4 + [2.0] * 6
    copy_back(flat * 3, buckets[0])
    assert tensors[2].tolist() == [[6.0, 6.0]] * 3

"""smp.init, ranks, groups, objects between ranks and the model's state dicts, on real processes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from opensmd.modelparallel import communicate, world
from opensmd.modelparallel.exceptions import SMPError, SMPNotInitializedError
from opensmd.modelparallel.init import init, shutdown
from opensmd.modelparallel.ranks.grid import CommGroup, RankType
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState
from tests.support.partitioned import restart, split
from tests.support.patience import PATIENCE
from tests.support.ranks import RankPool, run_once


def small() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model.add_module("tied", nn.Linear(4, 4, bias=False))
    model.tied.weight = model[2].weight
    return model


def check_places(placement: str) -> None:
    restart(partitions=2, ddp=True, placement_strategy=placement)
    rank = dist.get_rank()
    stage = rank % 2 if placement == "cluster" else rank // 2
    replica = rank // 2 if placement == "cluster" else rank % 2
    assert (world.rank(), world.size(), world.local_rank(), world.local_size()) == (rank, 4, rank, 4)
    assert (world.pp_rank(), world.mp_rank(), world.tp_rank()) == (stage, stage, 0)
    assert (world.dp_rank(), world.rdp_rank(), world.dp_size(), world.mp_size()) == (replica, replica, 2, 2)
    assert (world.tp_size(), world.pp_size(), world.rdp_size()) == (1, 2, 2)
    assert world.get_mp_group()[stage] == rank == world.get_dp_group()[replica]
    assert world.get_tp_group() == [rank]
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=world.get_dp_process_group())
    assert total.item() == sum(world.get_dp_group())
    assert dist.get_world_size(world.get_world_process_group()) == 4
    assert dist.get_process_group_ranks(world.get_mp_process_group()) == world.get_mp_group()


def check_objects() -> None:
    restart(partitions=2, ddp=True)
    rank = dist.get_rank()
    sent = {"rank": rank, "tensor": torch.arange(3) + rank, "text": "ü" * 100_000}
    for first in (0, 1):
        if world.pp_rank() == first:
            communicate.broadcast(sent, CommGroup.PP_GROUP)
        else:
            found = communicate.recv_from(first, RankType.PP_RANK)
            assert found["rank"] == world.get_pp_group()[first]
            assert torch.equal(found["tensor"], torch.arange(3) + found["rank"])
    if rank == 0:
        communicate.broadcast(None, CommGroup.WORLD)
        communicate.send("hello", 3, RankType.WORLD_RANK)
        assert communicate.recv_from(3, RankType.WORLD_RANK) == "hello back"
    else:
        assert communicate.recv_from(0, RankType.WORLD_RANK) is None
    if rank == 3:
        got = communicate.recv_from(0, RankType.WORLD_RANK)
        communicate.send(got + " back", 0, RankType.WORLD_RANK)
    assert communicate.allgather(rank, CommGroup.DP_GROUP) == world.get_dp_group()
    assert communicate.allgather({rank}, CommGroup.WORLD) == [{0}, {1}, {2}, {3}]
    communicate.barrier()
    communicate.mp_barrier()
    communicate.dp_barrier()
    communicate.barrier(CommGroup.TP_GROUP)
    with pytest.raises(ValueError, match="there is no PP_RANK 2 on rank"):
        communicate.send(1, 2, RankType.PP_RANK)
    with pytest.raises(ValueError, match="itself"):
        communicate.recv_from(rank, RankType.WORLD_RANK)
    with pytest.raises(TypeError, match=r"not a smp.CommGroup; expected one of smp.WORLD"):
        communicate.allgather(1, dist.group.WORLD)


def check_init() -> None:
    shutdown()
    for use in (world.rank, world.get_mp_process_group, communicate.barrier, lambda: state.cfg):
        with pytest.raises(SMPNotInitializedError, match=r"call smp.init\(\) first"):
            use()
    assert not world.is_initialized()
    with pytest.raises(ValueError, match="2 replicas of 2 partitions, but ddp is False"):
        init({"partitions": 2})
    with pytest.raises(ValueError, match="4 ranks cannot hold whole replicas of 3"):
        init({"partitions": 3, "ddp": True})
    init({"partitions": 4})
    assert world.is_initialized()
    init({"partitions": 4})
    with pytest.raises(SMPError, match=r"called again with other settings: .*degree=2 \(was 4\)"):
        init({"partitions": 2, "ddp": True})


def check_more_settings() -> None:
    restart(microbatches=4, ddp=True)
    init({"partitions": 2})
    assert (state.cfg.microbatches, state.cfg.partitions, state.cfg.active_microbatches) == (4, 2, 4)
    assert (world.pp_size(), world.dp_size()) == (2, 2)
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=world.get_dp_process_group())
    assert total.item() == sum(world.get_dp_group())
    init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True, "pipeline": "simple"})
    assert state.cfg.pipeline == "simple"
    with pytest.raises(SMPError, match=r"microbatches=2 \(was 4\).*settings can only be added"):
        init({"microbatches": 2})
    split(ModelState(small()))
    with pytest.raises(SMPError, match=r"only before smp.DistributedModel"):
        init({"optimize": "speed"})


def test_a_second_init_may_add_settings_before_there_is_a_model(pool: Callable[[int], RankPool]) -> None:
    pool(4).run(check_more_settings)


def broadcast_on_all_ranks() -> str:
    init({"partitions": 2})
    try:
        communicate.broadcast({"a": 1}, CommGroup.WORLD)
    except SMPError as error:
        return str(error)
    return "nothing"


def test_who_broadcasts_on_all_ranks_is_told_to_receive_on_the_others() -> None:
    for outcome in run_once(2, broadcast_on_all_ranks):
        assert "sending to rank" in outcome.value and "smp.recv_from(the sender's rank" in outcome.value


@pytest.mark.parametrize("backend", ["gloo", "smddp"])
def test_places_groups_and_objects_are_as_documented(pool: Callable[[int], RankPool], backend: str) -> None:
    ranks = pool(4)
    ranks.run(check_init, backend=backend)
    ranks.run(check_places, "cluster", backend=backend)
    ranks.run(check_places, "spread", backend=backend)
    ranks.run(check_objects, backend=backend)


def test_a_process_started_by_hand_is_a_world_of_one() -> None:
    script = (
        "import gc\n"
        "gc.disable()\n"
        "from opensmd.modelparallel.init import init\n"
        "from opensmd.modelparallel import world, communicate\n"
        "from opensmd.modelparallel.ranks.grid import CommGroup\n"
        "gc.freeze()\n"
        "init()\n"
        "print(world.rank(), world.size(), world.mp_size(), communicate.allgather('x', CommGroup.WORLD))\n"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environ,
    )
    assert done.stdout == "0 1 1 ['x']\n", done.stderr
    assert "Warning" not in done.stderr


def check_model_state(size: int) -> None:
    restart(partitions=size)
    whole = small()
    expected = {name: value.clone() for name, value in whole.state_dict().items()}
    model = ModelState(small())
    assert not model.partitioned
    for early in (model.local_state_dict, lambda: list(model.local_parameters())):
        with pytest.raises(SMPError, match="once the model is partitioned"):
            early()
    seen: list[Any] = []
    model.register_post_partition_hook(lambda *given: seen.append(given))
    model.register_post_partition_hook(lambda *given: seen.append("removed")).remove()
    split(model)
    assert model.partitioned and seen == [(model, None)]

    names = [name for name, _ in model.local_named_parameters()]
    everyone = communicate.allgather(names, CommGroup.MP_GROUP)
    assert sorted(itertools.chain(*everyone)) == sorted(name for name, _ in whole.named_parameters())
    assert [id(parameter) for parameter in model.local_parameters()] == [
        id(parameter) for name, parameter in model.module.named_parameters() if name in names
    ]
    modules = communicate.allgather([name for name, _ in model.local_named_modules()], CommGroup.MP_GROUP)
    assert sorted(itertools.chain(*modules)) == sorted(name for name, _ in whole.named_modules())
    assert len(list(model.local_modules())) == len(modules[world.mp_rank()])
    buffers = communicate.allgather([name for name, _ in model.local_named_buffers()], CommGroup.MP_GROUP)
    assert sorted(itertools.chain(*buffers)) == sorted(name for name, _ in whole.named_buffers())

    full = model.state_dict()
    assert list(full) == list(expected), "names and order are the plain module's"
    assert all(torch.equal(full[name], expected[name]) for name in expected)
    assert full["2.weight"].data_ptr() == full["tied.weight"].data_ptr(), "tied weights stay tied"
    assert full._metadata == whole.state_dict()._metadata
    first = model.state_dict(gather_to_rank0=True)
    assert list(first) == (list(expected) if world.mp_rank() == 0 else [])
    assert all(torch.equal(first[name], expected[name]) for name in first)
    local = model.local_state_dict()
    assert local.pop("_smp_is_partial") is True
    local = {name: value.clone() for name, value in local.items()}
    assert all(torch.equal(value, expected[name]) for name, value in local.items())

    changed = {name: value + 1 for name, value in expected.items()}
    assert model.load_state_dict(changed).missing_keys == []
    assert all(torch.equal(value, changed[name]) for name, value in model.state_dict().items())
    partial = {**local, "_smp_is_partial": True}
    model.load_state_dict(partial)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    model.load_state_dict(
        {**{n: value + 1 for n, value in local.items()}, "_smp_is_partial": True}, same_partition_load=True
    )
    assert all(torch.equal(value, changed[name]) for name, value in model.state_dict().items())

    with pytest.raises(RuntimeError, match=r"size mismatch for 3.bias: \(5,\) in the checkpoint, \(2,\)"):
        model.load_state_dict({**expected, "3.bias": torch.zeros(5)})
    with pytest.raises(RuntimeError, match=r"missing keys \['3.bias'\], unexpected keys \['other'\]"):
        less = {name: value for name, value in expected.items() if name != "3.bias"}
        model.load_state_dict({**less, "other": torch.zeros(1)})
    assert all(torch.equal(value, changed[name]) for name, value in model.state_dict().items()), "unchanged"
    loose = model.load_state_dict({**less, "other": torch.zeros(1)}, strict=False)
    assert (loose.missing_keys, loose.unexpected_keys) == (["3.bias"], ["other"])

    done: list[Any] = []
    model.register_post_step_hook(lambda *given: done.append(given))
    model.finish_step()
    model.finish_step()
    assert done == [(model, None)]

    model.load_state_dict(expected)
    model.cpu()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    inside, outside = model.get_module().eval(), whole.eval()
    assert torch.equal(inside[:2](x), outside[:2](x)), "after cpu() every rank has the whole model"
    assert torch.equal(inside[3].weight, outside[3].weight)


def check_load_before_partition() -> None:
    restart(partitions=2)
    target = {name: value + 1 for name, value in small().state_dict().items()}
    full = ModelState(small())
    full.load_state_dict(target)
    split(full)
    assert all(torch.equal(value, target[name]) for name, value in full.state_dict().items())
    parts = full.local_state_dict()
    later = ModelState(small())
    later.load_state_dict(parts)
    split(later)
    assert all(torch.equal(value, target[name]) for name, value in later.state_dict().items())
    same = ModelState(small())
    same.load_state_dict(parts, same_partition_load=True)
    split(same)
    assert all(torch.equal(value, target[name]) for name, value in same.state_dict().items())


def test_state_dicts_parts_and_hooks_work_in_one_to_three_partitions(
    pool: Callable[[int], RankPool],
) -> None:
    pool(2).run(check_model_state, 2, backend="gloo")
    pool(3).run(check_model_state, 3, backend="gloo")
    pool(1).run(check_model_state, 1, backend="gloo")


def test_what_is_loaded_before_partitioning_is_there_after_it(pool: Callable[[int], RankPool]) -> None:
    pool(2).run(check_load_before_partition, backend="gloo")

"""The life of groups: ways to start, groups beside groups, splitting, timeouts, ending and again, fork."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from opensmd.collectives import _torch_internals
from opensmd.collectives import exchange as exchanging
from opensmd.collectives.exchange import Exchange
from opensmd.collectives.flight import group_events, write_group_trace
from opensmd.collectives.making.arena import share_arena
from opensmd.collectives.stall import members, stall_report
from opensmd.native.build import load
from tests.support.debug_wrapper import wrapped
from tests.support.patience import PATIENCE
from tests.support.ranks import RankPool, run_once

Pool = Callable[[int], RankPool]
NAME = "smddp"


def total(group: Any = None) -> float:
    tensor = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def run_groups_beside_groups() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    assert dist.get_backend() == NAME
    gloo = dist.new_group(backend="gloo")
    part = dist.new_group([0, size - 1])
    again = dist.new_group([0, size - 1])
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert dist.get_backend(gloo) == "gloo"
    for _ in range(3):
        assert total() == total(gloo) == sum(range(size))
        if rank in (0, size - 1):
            assert total(part) == total(again) == size - 1
        assert total(alone) == rank
    if rank in (0, size - 1):
        dist.destroy_process_group(part)
        assert total(again) == size - 1
    pairs, _ = dist.new_subgroups(2) if size % 2 == 0 else (None, None)
    if pairs is not None:
        assert total(pairs) == 2 * (rank // 2 * 2) + 1
    unsorted = dist.new_group([size - 1, *range(size - 1)], sort_ranks=False)
    assert dist.get_group_rank(unsorted, size - 1) == 0
    found = [torch.empty(()) for _ in range(size)]
    dist.all_gather(found, torch.tensor(float(rank)), group=unsorted)
    assert [int(item) for item in found] == [size - 1, *range(size - 1)]


def is_no_group(group: Any) -> bool:
    """Whether a split left this rank out, as torch 2.13 or a later one says it."""
    return group is None or group is dist.GroupMember.NON_GROUP_MEMBER


def arenas() -> int:
    """How many pieces of arenas this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:opensmd")


def run_split() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    mapped = arenas()
    dist.destroy_process_group(dist.split_group(split_ranks=[list(range(size))]))
    assert arenas() == mapped > 0
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    part = dist.split_group(split_ranks=halves, group_desc="halves")
    assert total(part) == sum(halves[0] if rank in halves[0] else halves[1])
    assert dist.get_backend(part) == NAME
    inner = dist.split_group(part, split_ranks=[[0]])
    assert is_no_group(inner) == (dist.get_rank(part) != 0)
    if not is_no_group(inner):
        assert total(inner) == rank
    # torch 2.13 sorts the ranks of a part, later ones keep their order
    turned = dist.split_group(split_ranks=[list(reversed(range(size)))])
    assert dist.get_rank(turned) == (size - 1 - rank if _torch_internals._SPLITS_AS_NEW_GROUP else rank)
    assert total(turned) == sum(range(size))
    with pytest.raises(ValueError, match="repeats a rank"):
        dist.split_group(split_ranks=[[0, 0]])
    dist.barrier()


def run_properties() -> None:
    group: Any = dist.new_group()
    backend = _torch_internals.cpu_backend(group)
    assert backend.name() == NAME
    assert backend.supports_splitting
    assert backend.options._timeout > timedelta(0)
    group.set_timeout(timedelta(seconds=21))
    assert backend.options._timeout == timedelta(seconds=21)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="only torch's NCCL can serve"):
            backend.eager_connect_single_device(torch.device("cuda:0"))
    dist.monitored_barrier(timeout=timedelta(seconds=PATIENCE))
    dist.monitored_barrier(wait_all_ranks=True)
    dist.barrier()


def run_barriers_with_devices() -> None:
    for device in (0, 1, 7):
        dist.barrier(device_ids=[device])
    dist.barrier(async_op=True, device_ids=[0]).wait()


def run_barrier_without_time() -> None:
    group = dist.new_group()
    with pytest.raises(RuntimeError, match=f"Rank {dist.get_rank()} timed out in monitoredBarrier"):
        dist.monitored_barrier(group, timeout=timedelta(0))
    assert total(group) == sum(range(dist.get_world_size()))  # nobody was waited for: the group lives


def run_records(folder: str) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    dist.all_reduce(torch.ones(3, 5))
    dist.broadcast(torch.ones(2), 0)
    dist.barrier()
    found = members()
    assert [member.rank for member in found] == list(range(size))
    assert {member.state for member in found} == {"running"}
    assert "No rank waits" in stall_report() or "inside" in stall_report()
    fresh = dist.new_group()
    assert [(member.entered, member.last) for member in members(fresh)] == [(0, "")] * size
    assert f"rank {rank} (running): no collective yet" in stall_report(fresh)
    events = group_events()
    names = [event.name for event in events if event.rank == (rank + 1) % size]
    assert names[-3:] == ["all_reduce", "broadcast", "barrier"]
    reduced = [event for event in events if event.name == "all_reduce"][-1]
    assert "count=15" in reduced.details["description"]
    assert reduced.end_ns > reduced.start_ns
    write_group_trace(events, Path(folder) / f"{rank}.json")


def test_a_group_that_is_never_complete_leaves_no_file_behind() -> None:
    native, made = load(), []

    def create(shape: Any, named: bool) -> Any:
        made.append(native.create_arena_file(shape, named))
        return made[-1]

    watched: Any = SimpleNamespace(create_arena_file=create, unlink_arena_file=native.unlink_arena_file)
    shape = native.ArenaShape()
    shape.size = 2
    exchange = Exchange(dist.HashStore(), 0, (0, 1), timeout=timedelta(seconds=0.1), group="half")
    for named in (False, True):
        with pytest.raises(dist.DistBackendError, match="rank 1 did not join"):
            share_arena(exchange, 0, (0,), watched, shape, lambda fd: fd, named=named)
    assert [Path(file.path).parts[1] for file in made] == ["proc", "dev"]
    assert not any(os.path.lexists(file.path) or os.path.lexists(f"/proc/self/fd/{file.fd}") for file in made)


def test_memory_that_a_rank_cannot_map_is_used_by_none() -> None:
    def join(fd: int) -> None:
        raise RuntimeError("cannot map 3 MiB\nand where in C++")

    native = load()
    exchange = Exchange(dist.HashStore(), 0, (0,), timeout=timedelta(seconds=PATIENCE), group="one")
    text = share_arena(exchange, 0, (0,), native, native.ArenaShape(), join, named=True)
    assert text == "rank 0 could not open the arena: cannot map 3 MiB"


def run_again_and_again() -> None:
    """One process group after another in the same processes, also over one store."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    port = int(os.environ["MASTER_PORT"])
    for number in range(3):
        os.environ["MASTER_PORT"] = str(port + number)  # torch's client may still find the server before it
        dist.init_process_group(NAME, timeout=timedelta(seconds=PATIENCE))
        assert total() == sum(range(size))
        dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port + 3, size, rank == 0, timedelta(seconds=PATIENCE))
    for _ in range(3):
        dist.init_process_group(NAME, store=store, rank=rank, world_size=size)
        assert total() == sum(range(size))
        dist.destroy_process_group()


def run_from_file(path: str) -> None:
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("SMDDP", init_method=f"file://{path}", rank=rank, world_size=size)
    assert total() == sum(range(size))
    dist.destroy_process_group()
    dist.init_process_group("cpu:smddp", init_method=f"file://{path}-2", rank=rank, world_size=size)
    assert total() == sum(range(size))
    dist.destroy_process_group()


def run_outliving() -> None:
    """Tensors and works outlive their group; the group does not take calls any more."""
    backend = _torch_internals.cpu_backend(None)
    tensor = backend.allocate_tensor(100_000, dtype=torch.float32, device=torch.device("cpu"))
    tensor.fill_(2.0)
    work = dist.all_reduce(tensor, async_op=True)
    group = dist.new_group()
    dist.destroy_process_group()
    work.wait()
    assert bool((tensor == 2.0 * int(os.environ["WORLD_SIZE"])).all())
    with pytest.raises(RuntimeError, match="shut down"):
        group.allreduce([torch.ones(1)])
    del backend, group, work
    tensor += 1


def run_ended_while_other_threads_wait() -> None:
    """What was queued before the group's end runs, whichever thread runs it, and nothing goes before that."""
    for turn in range(10):
        group = dist.new_group()
        tensors = [torch.ones(1) for _ in range(6)]
        if dist.get_rank() == turn % 2:
            time.sleep(0.01)
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        waiting = [threading.Thread(target=work.wait) for work in works[::2]]
        for thread in waiting:
            thread.start()
        dist.destroy_process_group(group)
        del group
        for thread in waiting:
            thread.join()
        works[-1].wait()
        assert all(tensor.item() == 2 for tensor in tensors)


def _end(group: Any, _: object) -> None:
    dist.destroy_process_group(group)


def run_ended_by_its_own_callback() -> None:
    """What was queued before the group's end runs, also where the queue's own thread ends the group."""
    group = dist.new_group()
    first, second = torch.ones(1), torch.ones(1)
    if dist.get_rank() == 1:
        time.sleep(0.2)  # both are queued on rank 0 before the first one is done
    works = [dist.all_reduce(one, group=group, async_op=True) for one in (first, second)]
    ended = works[0].get_future().then(partial(_end, group))
    del group
    ended.wait()
    works[1].wait()
    assert first.item() == second.item() == 2


def told_in_a_child(call: Callable[[], Any]) -> str:
    """What a forked child is told in a call."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            os.write(writer, b"no error")
        except BaseException as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 4096).decode()


def run_fork() -> list[str]:
    """What forked children are told when they use their parent's group; the parent goes on."""
    told = [told_in_a_child(total)]
    told_in_a_child(dist.distributed_c10d._world.pg_map.clear)  # drops the group in the child
    assert total() == sum(range(dist.get_world_size()))
    works = []
    if dist.get_rank() == 0:
        works.append(dist.all_reduce(torch.ones(1), async_op=True))
        told.append(told_in_a_child(works[0].wait))
    told.append(told_in_a_child(dist.destroy_process_group))
    if dist.get_rank() != 0:
        works.append(dist.all_reduce(torch.ones(1), async_op=True))
    works[0].wait()
    assert total() == sum(range(dist.get_world_size()))
    return told


def run_debug_detail() -> None:
    assert total() == sum(range(dist.get_world_size()))
    # torch compares the ranks' numbers of each call, also where they have run different ones of those before
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(50)]
    for work in works:
        work.wait()
    dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_groups_work_beside_each_other_and_beside_gloo(pool: Pool, world_size: int) -> None:
    pool(world_size).run(run_groups_beside_groups)


@pytest.mark.newest
def test_split_group_works_without_an_accelerator(pool: Pool) -> None:
    pool(4).run(run_split)


@pytest.mark.newest
def test_properties_that_torch_asks_a_backend_for(pool: Pool) -> None:
    pool(2).run(run_properties)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the barrier is NCCL's, which needs a GPU a rank")
def test_device_ids_of_a_barrier_mean_nothing_where_there_are_no_devices(pool: Pool) -> None:
    pool(2).run(run_barriers_with_devices)


def test_a_monitored_barrier_without_time_says_so_and_leaves_the_group_usable(pool: Pool) -> None:
    pool(2).run(run_barrier_without_time)


def differ_in_root(group: Any) -> None:
    dist.broadcast(torch.ones(2), dist.get_rank(), group)


def abort_on_the_second(group: Any) -> None:
    if dist.get_rank() == 2:
        group._get_backend(torch.device("cpu")).abort()
    dist.barrier(group)


def come_late_on_the_first(group: Any) -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait([f"{group.group_name} was given up"], timedelta(seconds=PATIENCE))
    try:
        dist.monitored_barrier(group, timeout=timedelta(seconds=0.1))
    finally:
        store.set(f"{group.group_name} was given up", "")


def run_errors_in_a_part() -> list[str]:
    """What ranks 1 and 2 are told in groups where they are 0 and 1."""
    found = []
    for mistake in (differ_in_root, abort_on_the_second, come_late_on_the_first):
        group = dist.new_group([1, 2])
        if dist.get_rank() > 0:
            with pytest.raises(dist.DistBackendError) as caught:
                mistake(group)
            found.append(str(caught.value))
    return found


def test_errors_in_a_group_of_some_ranks_name_them_by_their_global_ranks(pool: Pool) -> None:
    _, first, second = pool(3).run(run_errors_in_a_part)
    for roots, abort, _ in (first, second):
        assert "rank 1 called broadcast(float32, count=2, root=rank 1)" in roots
        assert "rank 2 called broadcast(float32, count=2, root=rank 2)" in roots
        assert "abort() was called on rank 2" in abort
    assert second[2].startswith("Rank 2 successfully reached monitoredBarrier")
    assert "not arrived: rank 1" in second[2]


def test_any_rank_can_read_what_all_ranks_did(pool: Pool, tmp_path: Path) -> None:
    pool(2).run(run_records, str(tmp_path))
    for rank in range(2):
        assert '"traceEvents"' in (tmp_path / f"{rank}.json").read_text()


def test_groups_can_be_made_again_after_they_were_destroyed() -> None:
    outcomes = run_once(2, run_again_and_again, backend=None)
    assert [outcome.kind for outcome in outcomes] == ["value", "value"], outcomes[0].text + outcomes[1].text


def run_with_other_ideas_of_the_group() -> None:
    """Rank 1 believes that there are three ranks, and then that it is the third of two."""
    rank = int(os.environ["RANK"])
    exchanging.GRACE = PATIENCE  # for the store, which is to answer however busy the machine is
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=PATIENCE))
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match="ranks 0, 2 did not join"):
            dist.init_process_group(NAME, store=store, rank=1, world_size=3, timeout=timedelta(seconds=0.5))
        with pytest.raises(ValueError, match=r"rank 2 cannot be one of 2: ranks go from 0 to 1.*WORLD_SIZE"):
            dist.init_process_group(NAME, store=store, rank=2, world_size=2)
        store.set("rank 1 is through", "")
    else:
        store.wait(["rank 1 is through"])
        said = (
            r"rank 1 did not join.* Rank 1 makes this group of ranks 0, 1, 2: give all ranks the same world"
        )
        with pytest.raises(dist.DistBackendError, match=said):
            dist.init_process_group(NAME, store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.5))


def test_ranks_that_are_wrong_about_the_group_are_told() -> None:
    outcomes = run_once(2, run_with_other_ideas_of_the_group, backend=None)
    assert [outcome.kind for outcome in outcomes] == ["value", "value"], outcomes[0].text + outcomes[1].text


def run_on_a_host_that_dns_cannot_know() -> float:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # else nobody asks what the name resolves to
    socket.gethostname = lambda: "h" * 64  # Linux allows one letter more than DNS
    dist.init_process_group(NAME, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
    found = total()
    dist.destroy_process_group()
    return found


def test_a_host_may_have_a_name_that_dns_cannot_know() -> None:
    outcomes = run_once(2, run_on_a_host_that_dns_cannot_know, backend=None)
    assert [outcome.value for outcome in outcomes] == [1, 1], outcomes[0].text + outcomes[1].text


def test_groups_start_from_a_file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_once(2, run_from_file, f"{folder}/store", backend=None)
    assert [outcome.kind for outcome in outcomes] == ["value", "value"], outcomes[0].text + outcomes[1].text


def test_tensors_and_works_may_outlive_their_group() -> None:
    outcomes = run_once(2, run_outliving)
    assert [outcome.kind for outcome in outcomes] == ["value", "value"], outcomes[0].text + outcomes[1].text


def test_a_group_may_end_while_threads_wait_for_its_calls(pool: Pool) -> None:
    pool(2).run(run_ended_while_other_threads_wait)


def test_a_callback_may_end_its_group(pool: Pool) -> None:
    pool(2).run(run_ended_by_its_own_callback)


def test_a_forked_child_is_told_that_the_group_is_its_parents() -> None:
    outcomes = run_once(2, run_fork)
    assert [outcome.kind for outcome in outcomes] == ["value", "value"], outcomes[0].text
    for outcome in outcomes:
        for told in outcome.value:
            assert "fork" in told


def test_torchs_debug_wrapper_fits_around_the_backend() -> None:
    outcomes = run_once(2, wrapped, run_debug_detail, backend=None)
    assert [outcome.kind for outcome in outcomes] == ["value", "value"], outcomes[0].text

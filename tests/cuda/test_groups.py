"""Groups of smddp with CUDA tensors: of some ranks, with a bound device, beside NCCL, ended and remade."""

# mypy: disable-error-code="no-untyped-call, attr-defined"
# some of torch's own functions have no annotations
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from opensmd.timeline.files import read_timeline
from opensmd.timeline.recorder import recorder
from tests.support.cuda import DEVICE, ENVIRONMENT, MAPPED, CudaRanks, on_gpu
from tests.support.ports import free_port
from tests.support.ranks import ROOT, run_once
from tests.support.tried import tried

Gpus = Callable[[int], CudaRanks]
TIMEOUT = timedelta(seconds=30)


def total(group: Any = None, device: str = DEVICE) -> float:
    tensor = torch.tensor([float(dist.get_rank())], device=device)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def groups_beside_groups() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    assert dist.get_backend() == "smddp"
    nccl, gloo = dist.new_group(backend="nccl"), dist.new_group(backend="gloo")
    again, alone = dist.new_group(), dist.new_group([rank], use_local_synchronization=True)
    last = dist.new_group([size - 1])
    for _ in range(2):
        assert total() == total(nccl) == total(gloo, "cpu") == total(again) == sum(range(size))
        assert total(alone) == rank
        assert rank != size - 1 or total(last) == size - 1
    for group in (nccl, gloo, again):
        dist.destroy_process_group(group)
    assert total() == sum(range(size))
    dist.destroy_process_group(alone)
    if rank == size - 1:
        dist.destroy_process_group(last)


def a_group_with_work_in_flight_ends() -> None:
    group = dist.new_group()
    tensors = [torch.full((200_000,), 1.0, device=DEVICE) for _ in range(4)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.destroy_process_group(group)
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert bool((tensor == dist.get_world_size()).all())
    assert total() == sum(range(dist.get_world_size()))


def an_aborted_group_says_so() -> None:
    group = dist.new_group()
    assert total(group) == total()
    dist.barrier()
    backend: Any = group._get_backend(torch.device(DEVICE))
    backend.abort()
    for device in (DEVICE, "cpu"):
        with pytest.raises(dist.DistBackendError, match="abort"):
            dist.all_reduce(torch.ones(2, device=device), group=group)
    dist.destroy_process_group(group)
    assert total() == sum(range(dist.get_world_size()))


def timeouts_reach_nccl() -> None:
    group: Any = dist.new_group()
    assert total(group) == total()
    group.set_timeout(timedelta(seconds=21))
    assert group._get_backend(torch.device(DEVICE)).options._timeout == timedelta(seconds=21)
    assert total(group) == total()
    dist.destroy_process_group(group)


def meshes() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cuda", (size,))
    assert dist.get_backend(mesh.get_group()) == "smddp"
    assert total(mesh.get_group()) == sum(range(size))
    square = init_device_mesh("cuda", (1, size), mesh_dim_names=("one", "all"))
    assert total(square["all"].get_group()) == sum(range(size))
    assert total(square["one"].get_group()) == rank


CHECKS = [
    groups_beside_groups,
    a_group_with_work_in_flight_ends,
    an_aborted_group_says_so,
    timeouts_reach_nccl,
    meshes,
]


@contextmanager
def world(backend: str = "smddp", **options: Any) -> Iterator[None]:
    """The group of all ranks, made and ended."""
    dist.init_process_group(backend, timeout=TIMEOUT, **options)
    yield
    dist.destroy_process_group()


def groups_of_a_bound_device() -> list[str]:
    """Three times, because names and stores begin anew each time."""
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(2):
        with world(device_id=device):
            assert total() == sum(range(dist.get_world_size()))
    with world(device_id=device):
        return tried([calls_with_a_bound_device, parts_with_a_bound_device, meshes])


def calls_with_a_bound_device() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    assert total() == total(device="cpu") == sum(range(size))
    again, part = dist.new_group(), dist.new_group([0])
    assert total(again) == sum(range(size))
    assert rank != 0 or total(part) == 0
    dist.destroy_process_group(again)


def parts_with_a_bound_device() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = dist.split_group(split_ranks=[list(range(size))], group_desc="all")
    assert whole is not None
    assert total(whole) == total(whole, "cpu") == sum(range(size))
    assert dist.get_backend(whole) == "smddp"
    single = dist.split_group(split_ranks=[[each] for each in range(size)])
    assert single is not None
    assert total(single) == rank
    first = dist.split_group(split_ranks=[[0]])
    assert (rank == 0) == (first is not None)
    assert first is None or total(first) == 0


def a_backend_for_each_device() -> None:
    with world("cpu:smddp,cuda:nccl"):
        part = dist.new_group([0, 1])
        for device in (DEVICE, "cpu"):
            assert total(device=device) == total(part, device) == sum(range(dist.get_world_size()))
    del part  # it has the store, whose keys NCCL would take for those of the next group
    bound = torch.device("cuda", torch.cuda.current_device())
    with world("cpu:smddp,cuda:nccl", device_id=bound):
        part = dist.new_group([1])
        for device in (DEVICE, "cpu"):
            assert total(device=device) == sum(range(dist.get_world_size()))
            assert dist.get_rank() != 1 or total(part, device) == 1


def groups_inside_the_debug_wrapper() -> list[str]:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    try:
        with world():
            backend: Any = dist.group.WORLD._get_backend(torch.device(DEVICE))  # type: ignore[union-attr]
            assert hasattr(backend, "wrapped_pg")
            return tried([calls_inside_the_debug_wrapper])
    finally:
        del os.environ["TORCH_DISTRIBUTED_DEBUG"]
        dist.set_debug_level(dist.DebugLevel.OFF)


def calls_inside_the_debug_wrapper() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for device in (DEVICE, "cpu", DEVICE):
        assert total(device=device) == sum(range(size))
    whole = torch.empty(size, device=DEVICE)
    dist.all_gather_into_tensor(whole, torch.full((1,), float(rank), device=DEVICE))
    assert whole.tolist() == list(range(size))
    received = torch.empty(2, device=DEVICE)
    calls = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank), device=DEVICE), 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    assert received.tolist() == [1 - rank] * 2
    dist.barrier()
    other = torch.ones(2 + rank, device=DEVICE)
    with pytest.raises(RuntimeError, match="Detected mismatch"):
        dist.all_reduce(other)


def recorded() -> None:
    """Calls of both devices, for the timeline that the environment asks for."""
    torch.ones(1, device=DEVICE)
    with world():
        for device in (DEVICE, "cpu"):
            for _ in range(5):
                total(device=device)
        dist.all_reduce(torch.ones(3, device=DEVICE), async_op=True).wait()
        torch.cuda.synchronize()
        time.sleep(0 if MAPPED else 1)  # torch looks for what has ended ten times a second
    written = recorder(int(os.environ["RANK"]))
    assert written is not None
    written.close()  # as the end of a process does


ENDS_WITHOUT_A_WORD = """
import os
from tests.support.cuda import DEVICE, use_gpu
use_gpu(int(os.environ["RANK"]), 2)
import torch
import torch.distributed as dist
dist.init_process_group("smddp")
tensor, other = torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
dist.all_reduce(tensor)
work = dist.all_reduce(other, async_op=True)
print(tensor.tolist(), flush=True)
dist.barrier()
"""


def test_processes_may_end_without_ending_their_group() -> None:
    places = {**os.environ, **ENVIRONMENT, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS_WITHOUT_A_WORD],
            env={**places, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert [out for out, _ in said] == ["[2.0, 2.0, 2.0]\n"] * 2


def test_groups_of_any_ranks_take_cuda_tensors(gpus: Gpus) -> None:
    for failures in gpus(2).run(tried, CHECKS, timeout=90, group_timeout=30):
        assert not failures, "\n".join(failures)


def test_groups_with_a_bound_device_connect_split_and_begin_again(gpus: Gpus) -> None:
    for failures in gpus(2).run(groups_of_a_bound_device, backend=None, timeout=90):
        assert not failures, "\n".join(failures)


def test_smddp_for_the_cpu_stands_beside_nccl_for_cuda(gpus: Gpus) -> None:
    gpus(2).run(a_backend_for_each_device, backend=None, timeout=60)


def test_torchs_debug_wrapper_fits_around_groups_with_cuda_tensors(gpus: Gpus) -> None:
    for failures in gpus(2).run(groups_inside_the_debug_wrapper, backend=None, timeout=60):
        assert not failures, "\n".join(failures)


def test_a_timeline_has_the_calls_of_both_devices(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "OPENSMD_TIMELINE": str(tmp_path)}
    outcomes = run_once(2, on_gpu, recorded, backend=None, env=environment, timeout=90)
    assert [outcome.kind for outcome in outcomes] == ["value"] * 2, outcomes[0].text + outcomes[1].text
    timeline = read_timeline(tmp_path)
    for rank in (0, 1):
        spans = [span for span in timeline[rank] if span.name == "all_reduce"]
        of_nccl = [span for span in spans if "/cuda/" in span.call]
        assert (len(spans), len(of_nccl)) == (11, 0 if MAPPED else 6)
        assert all(0 <= span.end_ns - span.start_ns < 30e9 for span in spans)
        assert len({span.call for span in spans}) == 11
    calls = [{span.call for span in timeline[rank] if span.name == "all_reduce"} for rank in (0, 1)]
    assert calls[0] == calls[1]

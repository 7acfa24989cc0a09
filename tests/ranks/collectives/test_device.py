"""Tensors that are not on the CPU go to the device's backend, made once and only when needed.

NCCL itself needs GPUs. Here torch's fake backend stands in its place and meta tensors in that of CUDA's,
which shows where each call goes, not that NCCL answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from opensmd.collectives import _torch_internals
from opensmd.collectives.making import torch_backends
from tests.support.patience import PATIENCE
from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]


def calls(served: Any, device: str) -> dict[str, Callable[[], Any]]:
    """Operations of the backend, on tensors of ``device``."""
    size, rank = dist.get_world_size(), dist.get_rank()
    options = dist.BarrierOptions()
    options.device = torch.device(device)

    def empty(count: int = 2) -> torch.Tensor:
        return torch.zeros(count, device=device)

    def many() -> list[torch.Tensor]:
        return [empty() for _ in range(size)]

    here = [many()] if rank == 0 else []
    return {
        "broadcast": lambda: served.broadcast([empty()]),
        "allreduce": lambda: served.allreduce([empty()]),
        "reduce": lambda: served.reduce([empty()]),
        "allgather": lambda: served.allgather([many()], [empty()]),
        "_allgather_base": lambda: served._allgather_base(empty(2 * size), empty()),
        "gather": lambda: served.gather(here, [empty()], dist.GatherOptions()),
        "scatter": lambda: served.scatter([empty()], here, dist.ScatterOptions()),
        "reduce_scatter": lambda: served.reduce_scatter([empty()], [many()]),
        "_reduce_scatter_base": lambda: served._reduce_scatter_base(empty(), empty(2 * size)),
        "alltoall": lambda: served.alltoall(many(), many()),
        "alltoall_base": lambda: served.alltoall_base(empty(2 * size), empty(2 * size), [], []),
        "barrier": lambda: served.barrier(options),
        "send": lambda: served.send([empty()], (rank + 1) % size, 0),
        "recv": lambda: served.recv([empty()], (rank + 1) % size, 0),
        "recv_anysource": lambda: served.recv_anysource([empty()], 0),
    }


@contextlib.contextmanager
def fake_backends(meeting: float = PATIENCE) -> Iterator[list[Any]]:
    """torch's fake backend in NCCL's place; those that were made.

    Args:
        meeting: how long a rank with a backend waits for the others before the first collective.
    """
    made: list[Any] = []
    original = torch_backends.nccl

    def stand_in(place: Any, exchange: Any) -> Any:
        exchange._timeout = meeting
        made.append(FakeProcessGroup._create_internal(place.rank, place.size))
        return made[-1]

    torch_backends.nccl = stand_in
    try:
        yield made
    finally:
        torch_backends.nccl = original


def run_dispatch() -> tuple[list[str], int]:
    with fake_backends() as made:
        group = dist.new_group()
        served = _torch_internals.cpu_backend(group)
        dist.all_reduce(torch.ones(2), group=group)
        assert made == []
        missing = []
        for name, call in calls(served, "meta").items():
            try:
                work = call()
                if work is not None:
                    work.wait()
            except (NotImplementedError, RuntimeError) as error:
                if "recvAnysource" not in str(error):  # torch's fake backend has none
                    missing.append(f"{name}: {error}")
        dist.all_reduce(torch.ones(2), group=group)
        return missing, len(made)


def run_first_collective_alone() -> str:
    """Rank 0 begins a collective that nobody else calls; messages before it need no meeting."""
    with fake_backends(meeting=0.1):
        group = dist.new_group()
        served, rank = _torch_internals.cpu_backend(group), dist.get_rank()
        (served.send if rank else served.recv)([torch.zeros(2, device="meta")], 1 - rank, 0).wait()
        found = ""
        if rank == 0:
            with pytest.raises(dist.DistBackendError) as error:
                served.allreduce([torch.zeros(2, device="meta")])
            found = str(error.value)
        dist.barrier()
        return found


def run_two_devices() -> None:
    """Memory of a device is none that the core could read."""
    size, rank = dist.get_world_size(), dist.get_rank()
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    many = [torch.zeros(2) for _ in range(size)]
    mixed, wide = [*many[1:], there], torch.zeros(2 * size, device="meta")
    served = _torch_internals.cpu_backend(None)
    refused = {
        "all_gather": lambda: served.allgather([mixed], [here]),
        "all_gather_into_tensor": lambda: served._allgather_base(wide, here),
        "all_gather_coalesced": lambda: served.allgather_coalesced([[here, there]] * size, [here, here]),
        "gather": lambda: served.gather([mixed] if rank == 0 else [], [here], dist.GatherOptions()),
        "scatter": lambda: served.scatter([here], [mixed] if rank == 0 else [], dist.ScatterOptions()),
        "reduce_scatter": lambda: served.reduce_scatter([here], [mixed]),
        "reduce_scatter_tensor": lambda: served._reduce_scatter_base(here, wide),
        "all_to_all": lambda: served.alltoall(mixed, many),
        "all_to_all_single": lambda: served.alltoall_base(wide, torch.zeros(2 * size), [], []),
        "all_reduce_coalesced": lambda: served.allreduce_coalesced([here, there]),
    }
    for name, call in refused.items():
        if name in ("gather", "scatter") and rank != 0:
            continue
        with pytest.raises(ValueError, match=f"{name} got tensors on cpu and on meta"):
            call()
            raise AssertionError(name)
    whole = torch.zeros(2 * size)
    for name, call in {
        "all_gather_into_tensor": lambda: served._allgather_base(whole, there),
        "reduce_scatter_tensor": lambda: served._reduce_scatter_base(there, whole),
        "all_to_all_single": lambda: served.alltoall_base(whole, wide, [], []),
    }.items():
        with pytest.raises(ValueError, match=f"{name} got tensors on a device and on cpu"):
            call()
            raise AssertionError(name)
    assert not served.supports_tensor_alloc(torch.device("meta"))
    dist.all_reduce(torch.ones(2))


def run_without_cuda() -> None:
    if torch.cuda.is_available():
        return
    served = _torch_internals.cpu_backend(None)
    refused = calls(served, "meta")
    refused.pop("barrier")()  # which device_ids do not send to a device where there is none
    for name, call in refused.items():
        with pytest.raises(RuntimeError, match="only torch's NCCL can serve"):
            call()
            raise AssertionError(name)
    assert served.supports_tensor_alloc(torch.device("cpu"))
    dist.all_reduce(torch.ones(2))


def test_every_call_on_device_tensors_goes_to_one_device_backend(pool: Pool) -> None:
    for missing, made in pool(2).run(run_dispatch):
        assert missing == []
        assert made == 1


def test_without_cuda_every_such_call_says_what_is_missing(pool: Pool) -> None:
    pool(2).run(run_without_cuda)


def test_a_first_collective_on_the_device_names_the_ranks_that_do_not_come(pool: Pool) -> None:
    found, _ = pool(2).run(run_first_collective_alone)
    assert "rank 1 did not join within 0.1 s (the first collective of CUDA tensors; this is rank 0)" in found


def test_a_call_with_tensors_of_several_devices_is_refused(pool: Pool) -> None:
    pool(2).run(run_two_devices)

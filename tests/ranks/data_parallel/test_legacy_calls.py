"""Every function of the old API, over tcp and gloo, every way to initialise, two to four processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as today
import torch.distributed.deprecated as dist
from torch.nn.parallel.deprecated import DistributedDataParallel

from opensmd.launch.mapped_cuda import cuda_on_cpu
from opensmd.legacy.api import current_session
from tests.scripts.legacy.calls import check_all, check_requests_complete_by_themselves
from tests.support.multicast import multicast_address
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import RankPool, describe, run_once

METHODS = ["env", "tcp", "file", "multicast"]
FLOATS = [torch.float16, torch.float32, torch.float64]


def arguments(method: str, world_size: int, port: int, path: str, cast: str) -> dict[str, object]:
    """The keywords of ``init_process_group`` on the rank that asks."""
    rank = int(os.environ["RANK"])
    if method == "env":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return {}
    if method == "tcp":
        return {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": world_size}
    if method == "file":
        return {"init_method": f"file://{path}", "world_size": world_size, "group_name": "calls"}
    os.environ["OPENSMD_LEGACY_INTERFACE"] = "lo"
    return {"init_method": cast, "world_size": world_size, "group_name": "calls"}


def every_function(
    world_size: int, jobs: list[tuple[str, str]], engine: str, ports: list[int], path: str, cast: str
) -> list[int]:
    os.environ.update(OPENSMD_LEGACY_ENGINE=engine, OPENSMD_LEGACY_TIMEOUT=str(PATIENCE))
    ranks = []
    for (backend, method), port in zip(jobs, ports, strict=True):
        dist.init_process_group(backend, **arguments(method, world_size, port, path, cast))
        assert current_session().transport.engine == engine
        ranks.append(dist.get_rank())
        if method == METHODS[0]:
            check_all()
        else:  # methods differ only before the engine comes in
            check_sum(world_size)
        dist.destroy_process_group()
        assert not dist.is_initialized()
    return ranks


def check_sum(world_size: int) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("engine", ["smddp", "gloo"])
def test_every_function_works_over_tcp_and_gloo_by_every_method(
    pool: Callable[[int], RankPool], world_size: int, engine: str, tmp_path: Path
) -> None:
    methods = METHODS if engine == "smddp" else METHODS[:1]
    jobs = [(backend, method) for method in methods for backend in ("TCP", "gloo")]
    ports = [free_port() for _ in jobs]
    ranks = pool(world_size).run(
        every_function,
        world_size,
        jobs,
        engine,
        ports,
        str(tmp_path / "rendezvous"),
        multicast_address(),
        backend=None,
        timeout=PATIENCE,
    )
    for job in zip(*ranks, strict=True):
        assert sorted(job) == list(range(world_size))
    assert list(tmp_path.iterdir()) == []


def beside_torch_distributed(port: int) -> None:
    """Today's package and the old one in one process, each with its own job; either may end first."""
    rank = today.get_rank()
    for _ in range(2):
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=1 - rank, world_size=2)
        old, new = torch.tensor([dist.get_rank()]), torch.tensor([rank])
        dist.broadcast(old, 0)
        today.broadcast(new, 0)
        assert old.item() == new.item() == 0
        assert dist.get_rank() == 1 - rank and today.get_rank() == rank
        dist.destroy_process_group()
        today.all_reduce(new)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    today.destroy_process_group()
    check_requests_complete_by_themselves(rank, 2)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


@pytest.mark.newest
def test_the_old_and_the_new_package_work_side_by_side(pool: Callable[[int], RankPool]) -> None:
    pool(2).run(beside_torch_distributed, free_port(), backend="gloo")


def agree_about_new_group(port: int) -> list[str]:
    os.environ.update(OPENSMD_LEGACY_ENGINE="gloo", OPENSMD_LEGACY_TIMEOUT=str(PATIENCE))
    rank = int(os.environ["RANK"])
    dist.init_process_group("tcp", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    texts = []
    try:
        dist.new_group([0, 1] if rank else [0])
    except RuntimeError as error:
        texts.append(str(error))
    if rank == 1:
        dist.send(torch.ones(1), 0)
    else:
        dist.recv(torch.ones(1), 1)  # the store ends with this rank, and the other has been told
        current_session().transport._timeout = 1.5  # type: ignore[attr-defined]
        try:
            dist.new_group([0, 1])
        except RuntimeError as error:
            texts.append(str(error))
    dist.destroy_process_group()
    return texts


def test_processes_that_disagree_about_a_group_are_told(pool: Callable[[int], RankPool]) -> None:
    first, second = pool(2).run(agree_about_new_group, free_port(), backend=None)
    assert "rank 0 names ranks [0], rank 1 names [0, 1]" in first[0]
    assert "rank 1 names ranks [0, 1], rank 0 names [0]" in second[0]
    assert "rank 1 has not called it within 1.5 s" in first[1]


def name_ranks_by_text(port: int) -> list[str]:
    dist.init_process_group("tcp", f"tcp://127.0.0.1:{port}", rank=int(os.environ["RANK"]), world_size=2)
    texts = []
    for ranks in ("01", [0.0, 1.0], 1):
        try:
            dist.new_group(ranks)
        except TypeError as error:
            texts.append(str(error))
    dist.destroy_process_group()
    return texts


def test_groups_are_made_of_integers_alone(pool: Callable[[int], RankPool]) -> None:
    for texts in pool(2).run(name_ranks_by_text, free_port(), backend=None):
        assert texts == [
            f"new_group(ranks={given}): expected a list of integers" for given in ("'01'", "[0.0, 1.0]", "1")
        ]


def dtypes_of_today(port: int) -> None:
    """Not of the era, but nothing stands in their way."""
    os.environ.update(OPENSMD_LEGACY_ENGINE="smddp", OPENSMD_LEGACY_TIMEOUT=str(PATIENCE))
    rank = int(os.environ["RANK"])
    dist.init_process_group("tcp", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for dtype in (torch.bfloat16, torch.complex64, torch.bool):
        tensor = torch.ones(3, dtype=dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.ones(3, dtype=dtype) + torch.ones(3, dtype=dtype)), dtype
        if rank == 0:
            dist.send(tensor, 1)
        else:
            received = torch.zeros(3, dtype=dtype)
            assert dist.recv(received) == 0
            assert torch.equal(received, tensor)
    # bitwise the same on all ranks, also where rounding depends on the order
    for dtype in FLOATS:
        generator = torch.Generator().manual_seed(rank)
        tensor = torch.randn(10_001, generator=generator).to(dtype)
        dist.all_reduce(tensor)
        both = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(both, tensor)
        assert torch.equal(both[0], both[1])
    parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
    dist.broadcast(parameter.data, 1)
    dist.broadcast(parameter, 1)
    assert parameter.tolist() == [1.0] * 4
    dist.destroy_process_group()


def test_dtypes_of_today_and_parameters_work_too(pool: Callable[[int], RankPool]) -> None:
    pool(2).run(dtypes_of_today, free_port(), backend=None)


def end_in_a_fork(port: int) -> float:
    os.environ.update(OPENSMD_LEGACY_ENGINE="smddp", OPENSMD_LEGACY_TIMEOUT=str(PATIENCE))
    rank = int(os.environ["RANK"])
    dist.init_process_group("tcp", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    child = os.fork()
    if child == 0:
        dist.destroy_process_group()  # as at the end of a script
        os._exit(0)
    os.waitpid(child, 0)
    tensor = torch.full((1,), float(rank))
    if rank == 0:
        dist.recv(tensor, 1)
    else:
        dist.send(tensor, 0)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def test_a_fork_that_ends_leaves_the_job_as_it_is(pool: Callable[[int], RankPool]) -> None:
    assert pool(2).run(end_in_a_fork, free_port(), backend=None) == [2.0, 2.0]


def wrong_arguments(port: int) -> None:
    """Each is refused before anything is sent, so the job goes on."""
    for backend in (3, "foo"):
        with pytest.raises(RuntimeError, match=f"Invalid distributed backend name: {backend}"):
            dist.init_process_group(backend)  # type: ignore[arg-type]
    for given in ({"world_size": "2"}, {"rank": None}):
        with pytest.raises(TypeError, match=r"(world_size|rank) must be an int, got ('2'|None)"):
            dist.init_process_group("tcp", **given)
    rank = int(os.environ["RANK"])
    dist.init_process_group("tcp", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for call in (
        lambda: dist.all_gather(torch.zeros(2, 2), torch.ones(2)),  # type: ignore[arg-type]
        lambda: dist.gather(torch.ones(2), gather_list=torch.zeros(2, 2)),
        lambda: dist.scatter(torch.ones(2), scatter_list=torch.zeros(2, 2)),
        lambda: dist.all_reduce_multigpu(torch.zeros(2, 2)),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"expected a list of tensors, got a tensor of shape \(2, 2\)"):
            call()
    pair = [torch.ones(2), torch.ones(2)]
    for other in (torch.distributed.ReduceOp.SUM, "sum"):
        for call in (
            lambda op: dist.all_reduce(torch.ones(2), op),
            lambda op: dist.all_reduce_multigpu(pair, op),
            lambda op: dist.reduce_multigpu(pair, 0, op),
        ):
            with pytest.raises(ValueError, match=r"expected reduce_op\.SUM, PRODUCT, MAX or MIN"):
                call(other)
    for room in (torch.empty(2, dtype=torch.int32), torch.empty(3)):
        with pytest.raises(
            RuntimeError, match="all_gather_multigpu: tensor sizes do not match: tensor 1 has"
        ):
            dist.all_gather_multigpu([[room, room]], [torch.ones(2)])
    with pytest.raises(TypeError, match=r"broadcast_multigpu: expected a torch\.Tensor, got 1"):
        dist.broadcast_multigpu([1], 0)  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="all_reduce: expected dense tensors, got one of layout"):
        dist.all_reduce(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match=r"device_ids=\[0\] are GPUs, but the module is on the CPU"):
        DistributedDataParallel(torch.nn.Linear(1, 1), device_ids=[0])
    total = torch.ones(1, requires_grad=True)
    dist.all_reduce_multigpu([total])
    assert total.item() == 2
    dist.destroy_process_group()


def test_wrong_arguments_are_refused_with_one_clear_error(pool: Callable[[int], RankPool]) -> None:
    pool(2).run(wrong_arguments, free_port(), backend=None)


def example_of_the_old_docs(path: str) -> list[float]:
    cuda_on_cpu.install()
    dist.init_process_group(
        backend="nccl", init_method=f"file://{path}", world_size=2, rank=int(os.environ["RANK"])
    )
    tensor_list = []
    for dev_idx in range(torch.cuda.device_count()):
        tensor_list.append(torch.FloatTensor([1]).cuda(dev_idx))
    dist.all_reduce_multigpu(tensor_list)
    dist.destroy_process_group()
    return [tensor.item() for tensor in tensor_list]


def test_the_multi_gpu_example_of_the_old_docs_runs_where_cuda_means_the_cpu(tmp_path: Path) -> None:
    outcomes = run_once(2, example_of_the_old_docs, str(tmp_path / "job"), backend=None)
    # two processes of two devices each
    assert [rank.value for rank in outcomes] == [[4.0, 4.0]] * 2, describe(example_of_the_old_docs, outcomes)

"""``torch.distributed.deprecated`` with CUDA tensors: ``nccl`` moves them, other backends stage them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as today

import opensmd.legacy as dist
from opensmd.legacy.parallel import DistributedDataParallel, DistributedDataParallelCPU
from tests.cuda.test_collectives import Gpus
from tests.ranks.data_parallel.test_legacy_parallel import Net, batch, losses
from tests.scripts.legacy import calls
from tests.support.cuda import DEVICE, MAPPED
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import ROOT

BACKENDS = ["nccl", "gloo"]  # tcp is gloo
EXPIRES = 30  # seconds that a call waits for a rank that has failed


def in_job(backend: str, port: int, check: Callable[..., None], *args: object) -> None:
    """On a rank: ``check`` within a job, where new tensors are on CUDA unless they say where they are."""
    os.environ.update(OPENSMD_LEGACY_TIMEOUT=str(EXPIRES), OPENSMD_LEGACY_ENGINE="auto")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with torch.device("cuda"):
        dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
        check(*args)
        dist.destroy_process_group()


def run(gpus: Gpus, backend: str, check: Callable[..., None], *args: object, ranks: int = 2) -> None:
    gpus(ranks).run(in_job, backend, free_port(), check, *args, backend=None, timeout=60)


def of_all(name: str) -> None:
    size = dist.get_world_size()
    assert torch.ones(1).device.type == DEVICE
    getattr(calls, name)(dist.get_rank(), list(range(size)), dist.group.WORLD)
    dist.barrier()


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_takes_cuda_tensors(gpus: Gpus, backend: str, name: str) -> None:
    run(gpus, backend, of_all, f"check_{name}")


def in_groups() -> None:
    """Of one, in another order than the ranks', and one without this process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for ranks in ([1, 0], [1], list(range(size))):
        group = dist.new_group(ranks)
        if rank not in ranks:
            calls.check_no_op(rank, ranks, group)
            continue
        calls.check_broadcast(rank, ranks, group)
        calls.check_all_gather(rank, ranks, group)
        dist.barrier(group)
        dist._clear_group_cache(group)
        calls.check_gather(rank, ranks, group)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_have_communicators_of_their_own(gpus: Gpus, backend: str) -> None:
    run(gpus, backend, in_groups)


def with_one_device_a_process() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = list(range(size))
    tensors = [calls.values(rank)]
    dist.all_reduce_multigpu(tensors)
    calls.same(tensors[0], calls.expected(dist.reduce_op.SUM, ranks), "all_reduce_multigpu")
    tensors = [calls.values(rank)]
    dist.reduce_multigpu(tensors, size - 1, dist.reduce_op.MAX)
    highest = calls.expected(dist.reduce_op.MAX, ranks)
    calls.same(tensors[0], highest if rank == size - 1 else calls.values(rank), "reduce_multigpu")
    dist.broadcast_multigpu(tensors, 0)
    calls.same(tensors[0], calls.values(0), "broadcast_multigpu")
    outputs = [[torch.zeros(3, 5) for _ in ranks]]
    dist.all_gather_multigpu(outputs, [calls.values(rank)])
    for output, other in zip(outputs[0], ranks, strict=True):
        calls.same(output, calls.values(other), "all_gather_multigpu")
    if not MAPPED:
        with pytest.raises(RuntimeError, match="two tensors are on one GPU"):
            dist.all_reduce_multigpu([torch.ones(2), torch.ones(2)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_functions_of_several_devices_work_with_one(gpus: Gpus, backend: str) -> None:
    run(gpus, backend, with_one_device_a_process)


def messages_over_nccl() -> None:
    """A pair of ranks; NCCL works off what is queued between two ranks in order, so both agree on it."""
    rank = dist.get_rank()
    forms: list[dict[str, object]] = [{"dtype": dtype} for dtype in calls.DTYPES]
    forms += [{"shape": shape} for shape in calls.SHAPES]
    for src in (0, 1):
        for form in forms:
            if rank == src:
                dist.send(calls.values(src, **form), 1 - src)  # type: ignore[arg-type]
            else:
                tensor = torch.zeros_like(calls.values(src, **form))  # type: ignore[arg-type]
                assert dist.recv(tensor, src) == src
                calls.same(tensor, calls.values(src, **form), form)  # type: ignore[arg-type]
    columns = torch.zeros(4, 2).t()
    first, second = calls.values(rank, (2, 4)), calls.values(rank, (100_000,))
    if rank == 0:
        requests = [dist.isend(first, 1), dist.isend(second, 1)]
    else:
        requests = [dist.irecv(columns, 0), dist.irecv(second, 0)]
    while not all(request.is_completed() for request in requests):
        pass
    for request in requests:
        request.wait()
    if rank == 1:
        calls.same(columns, calls.values(0, (2, 4)), "not contiguous")
        calls.same(second, calls.values(0, (100_000,)), "the second")


def test_messages_go_through_nccl_in_order(gpus: Gpus) -> None:
    run(gpus, "nccl", messages_over_nccl)


def staged_messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for check in (
        calls.check_send_and_recv,
        calls.check_any_source,
        calls.check_all_send_before_any_receives,
        calls.check_many_outstanding_requests,
        calls.check_requests_complete_by_themselves,
        calls.check_sizes_that_differ,
    ):
        check(rank, size)
        dist.barrier()


def test_messages_of_cuda_tensors_are_staged(gpus: Gpus) -> None:
    run(gpus, "tcp", staged_messages)


def received_on_another_stream() -> None:
    """What is computed on a stream with a received tensor comes after its bytes, and before the next ones."""
    rank, total = dist.get_rank(), torch.zeros(200_000)
    target, stream = torch.zeros(200_000), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for turn in range(1, 6):
            if rank == 0:
                target.fill_(turn)
                dist.send(target, 1)
            else:
                request = dist.irecv(target, 0)
                request.wait()
                total += target
    stream.synchronize()
    assert rank == 0 or total.eq(15).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_keep_to_the_stream_of_their_caller(gpus: Gpus, backend: str) -> None:
    run(gpus, backend, received_on_another_stream)


def dtypes_of_today() -> None:
    """Those that NCCL reduces itself; what it moves as bytes."""
    size = dist.get_world_size()
    for dtype in (torch.bfloat16, torch.complex64):
        tensor = torch.ones(3, dtype=dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((3,), size, dtype=dtype)), dtype
    for dtype in (torch.bfloat16, torch.complex64, torch.bool):
        tensor = torch.full((3,), dist.get_rank(), dtype=dtype)
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, torch.ones(3, dtype=dtype)), dtype
    parameter = torch.nn.Parameter(torch.full((4,), float(dist.get_rank())))
    dist.broadcast(parameter, 1)
    assert parameter.tolist() == [1.0] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_of_today_work_on_cuda(gpus: Gpus, backend: str) -> None:
    run(gpus, backend, dtypes_of_today)


def refusals_of_nccl() -> None:
    """Each before anything is sent: the job goes on."""
    on_cpu, on_cuda, other = torch.ones(2, device="cpu"), torch.ones(2), 1 - dist.get_rank()
    assert dist._backend is dist.dist_backend.NCCL
    for function in (dist.all_reduce, lambda one: dist.send(one, other), lambda one: dist.broadcast(one, 0)):
        with pytest.raises(RuntimeError, match=r"does not support \w+ of cpu tensors .*tcp, gloo, mpi"):
            function(on_cpu)
    with pytest.raises(RuntimeError, match="all_gather of cpu tensors"):
        dist.all_gather([on_cpu, on_cpu], on_cuda)
    with pytest.raises(RuntimeError, match="DataChannelNccl does not support recv from any source"):
        dist.recv(on_cuda)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        dist._register_stream(torch.cuda.Stream())
    assert "is ignored" in str(seen[0].message)
    dist.all_reduce(on_cuda)
    assert on_cuda.tolist() == [2.0, 2.0]


@pytest.mark.skipif(MAPPED, reason="the mapping makes nccl gloo, which takes CPU tensors")
def test_what_nccl_cannot_do_is_refused_by_name(gpus: Gpus) -> None:
    run(gpus, "nccl", refusals_of_nccl)


def reductions_on_a_stream() -> None:
    """What a stream computes is reduced after it, and used after that, without a synchronisation."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.full((1 << 20,), float(dist.get_rank() + 1))
        for _ in range(5):
            tensor = tensor * 2
            dist.all_reduce(tensor)
        result = tensor.sum() / tensor.numel()
    stream.synchronize()
    assert result.item() == 3 * 2**5 * 2**4


def test_collectives_follow_the_current_stream(gpus: Gpus) -> None:
    run(gpus, "nccl", reductions_on_a_stream)


def train_as_one_process(kind: str) -> None:
    """Each wrapper against the whole batch in one process, on the same device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    uneven = kind == "ddp"  # the CPU wrapper needs the same parameters on all processes
    torch.manual_seed(rank)
    own = Net().to("cuda")
    own.norm.running_mean.fill_(float(rank))
    torch.manual_seed(0)
    reference = Net().to("cuda")
    device_ids = [torch.cuda.current_device()]
    model = DistributedDataParallel(own, device_ids) if uneven else DistributedDataParallelCPU(own)
    assert own.norm.running_mean[0].item() == (0.0 if uneven else rank)
    ours = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        inputs, targets = batch_on_cuda(step)
        branches = [not uneven or (step + other) % 2 == 0 for other in range(size)]
        ours.zero_grad()
        theirs.zero_grad()
        output = model(inputs.chunk(size)[rank], branches[rank])
        torch.nn.functional.mse_loss(output, targets.chunk(size)[rank]).backward()
        losses(reference, inputs, targets, branches).backward()
        for (name, mine), want in zip(own.named_parameters(), reference.parameters(), strict=True):
            if want.grad is None:
                assert mine.grad is None, name
            else:
                torch.testing.assert_close(mine.grad, want.grad, rtol=1e-4, atol=1e-5, msg=f"{name}, {step}")
        ours.step()
        theirs.step()


def beside_torch_distributed() -> None:
    """Each package has its own communicator on the device; they may be used in turn."""
    for turn in range(3):
        old, new = torch.full((9,), float(turn)), torch.full((9,), float(turn + 1))
        dist.all_reduce(old)
        today.all_reduce(new)
        assert (old[0].item(), new[0].item()) == (2.0 * turn, 2.0 * turn + 2)


def test_the_old_and_the_new_package_share_a_device(gpus: Gpus) -> None:
    check = (in_job, "nccl", free_port(), beside_torch_distributed)
    gpus(2).run(*check, backend="smddp", timeout=60, group_timeout=EXPIRES)


def batch_on_cuda(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.device("cpu"):
        inputs, targets = batch(step)
    return inputs.to("cuda"), targets.to("cuda")


@pytest.mark.parametrize("kind", ["ddp", "cpu"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrapped_models_train_on_cuda_as_one_process(gpus: Gpus, backend: str, kind: str) -> None:
    run(gpus, backend, train_as_one_process, kind)


def wrapped_with_device_ids() -> None:
    """As scripts of the time named their GPU; a batch on the CPU is taken there."""
    device, rank = torch.cuda.current_device(), dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(2, 1), device_ids=[device], output_device=device)
    output = model(torch.full((1, 2), float(rank), device="cpu"))
    assert output.device.type == DEVICE
    output.sum().backward()
    assert model.module.weight.grad.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrapper_scatters_the_batch_to_its_device(gpus: Gpus, backend: str) -> None:
    run(gpus, backend, wrapped_with_device_ids)


UNDER_MPI = """
import sys
import torch
import opensmd.legacy as dist
from tests.scripts.legacy import calls

with torch.device("cuda"):
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter"):
        getattr(calls, f"check_{name}")(rank, list(range(size)), dist.group.WORLD)
    for check in (calls.check_send_and_recv, calls.check_many_outstanding_requests):
        check(rank, size)
    dist.destroy_process_group()
sys.stdout.write(f"rank {rank} of {size} got through on {torch.ones(1, device='cuda').device.type}\\n")
"""


def mpiexec() -> str | None:
    """The launcher of an MPI that mpi4py finds, too."""
    found = subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, check=False)
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which("mpiexec", path=beside) if found.returncode == 0 else None


def test_mpi_stages_cuda_tensors(tmp_path: Path) -> None:
    launcher = mpiexec()
    if launcher is None:
        pytest.skip("mpi4py or an MPI library is not here: pip install 'opensmd[mpi]'")
    script = tmp_path / "under_mpi.py"
    script.write_text(UNDER_MPI)
    rank = ["-m", "opensmd.launch.rank", *(["--device", "cpu"] if MAPPED else [])]
    done = subprocess.run(
        [launcher, "-n", "2", sys.executable, *rank, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=PATIENCE / 2,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [f"rank {number} of 2 got through on {DEVICE}" for number in range(2)]
    assert sorted(done.stdout.splitlines()) == said


def python_path() -> str:
    """Where a script in another folder finds the tests."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

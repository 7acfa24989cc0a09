"""Scripts that hard-code CUDA on the CPU: every mapped call does what it says and can be undone."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.jit import _builtins

from opensmd.launch.mapped_cuda import cuda_on_cpu
from opensmd.launch.mapped_cuda.cpu_device import device_index, without_cuda
from opensmd.launch.mapped_cuda.cuda_on_cpu import _barrier_without_devices, _places, _without_nccl
from tests.support.forks import ForkedProcess, as_main
from tests.support.patience import PATIENCE


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cuda_on_cpu.install()
    yield
    torch.cuda.set_device(0)
    cuda_on_cpu.uninstall()


def test_uninstalling_puts_every_original_back() -> None:
    before = {(id(owner), name): getattr(owner, name, None) for owner, name, _ in _places()}
    cuda_on_cpu.install()
    assert torch.cuda.is_available()
    cuda_on_cpu.install()
    cuda_on_cpu.uninstall()
    after = {(id(owner), name): getattr(owner, name, None) for owner, name, _ in _places()}
    assert before == after
    assert len(before) > 100


@pytest.mark.usefixtures("mapped")
def test_every_way_to_name_a_device_creates_on_the_cpu() -> None:
    for device in ("cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1), torch.device(1), 0):
        assert torch.zeros(2, device=device).device.type == "cpu"
        assert torch.ones(2).to(device).device.type == "cpu"
        assert torch.ones(2).to(device=device, dtype=torch.float64).dtype == torch.float64
        assert torch.ones(2).new_full((3,), 1.0, device=device).shape == (3,)
        assert nn.Linear(2, 2).to(device).weight.device.type == "cpu"
        assert nn.Linear(2, 2, device=without_cuda(device)).weight.device.type == "cpu"
    assert torch.arange(3).cuda().cuda(1).cuda(non_blocking=True).sum() == 3
    assert torch.cuda.FloatTensor([1.0]).dtype == torch.float32
    for kind in ("torch.cuda.DoubleTensor", torch.cuda.DoubleTensor, "torch.DoubleTensor", torch.float64):
        assert torch.ones(2).type(kind).type() == "torch.DoubleTensor"
        assert nn.Linear(2, 2).type(kind).weight.dtype == torch.float64
    assert torch.fft.fftfreq(4, device="cuda").device.type == "cpu"
    ragged = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged, device="cuda")
    assert ragged.device.type == "cpu"
    assert torch.ones(2).pin_memory().device.type == torch.ones(2, pin_memory=True).device.type == "cpu"


@pytest.mark.usefixtures("mapped")
def test_a_data_parallel_module_is_called_with_the_whole_batch() -> None:
    inner = nn.Linear(2, 3)
    batch = torch.randn(4, 2)
    for model in (nn.DataParallel(inner).cuda(), nn.DataParallel(inner.cuda(), device_ids=[0, 1])):
        assert torch.equal(model(batch.cuda()), inner(batch))
        assert [*model.state_dict()] == ["module.weight", "module.bias"]
    assert torch.equal(nn.parallel.data_parallel(inner, (batch,), [0, 1]), inner(batch))


def created(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) + torch.ones(2) + torch.tensor([1.0, 2.0])


def test_functions_that_create_tensors_can_be_scripted() -> None:
    before = dict(_builtins._get_builtin_table())  # type: ignore[no-untyped-call]
    cuda_on_cpu.install()
    assert torch.jit.script(created)(torch.ones(2)).tolist() == [2.0, 3.0]
    cuda_on_cpu.uninstall()
    assert before == _builtins._get_builtin_table()  # type: ignore[no-untyped-call]


@pytest.mark.processes
def test_what_a_script_imports_later_is_mapped_and_can_be_compiled() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from opensmd.launch.torch_import import without_collector\n"
            "without_collector()\n"
            "from opensmd.launch.mapped_cuda.cuda_on_cpu import install, uninstall\n"
            "install()\n"
            "import torch\n"
            "assert torch.compile(lambda x: x.cuda() + 1, backend='eager')(torch.ones(1)) == 2\n"
            "from torch.distributed.optim import ZeroRedundancyOptimizer\n"  # compiles some functions
            "from torch.distributed.fsdp import FullyShardedDataParallel\n"
            "mapped = FullyShardedDataParallel.__init__\n"
            "uninstall()\n"
            "assert FullyShardedDataParallel.__init__ is not mapped",
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


def seen_in_another_process() -> tuple[int, str]:
    return torch.cuda.device_count(), torch.ones(1).cuda(2).device.type


@pytest.mark.processes
@pytest.mark.usefixtures("mapped")
def test_processes_that_a_script_spawns_are_mapped_and_have_the_devices_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with multiprocessing.get_context("spawn").Pool(1) as processes:
        assert processes.apply(seen_in_another_process) == (3, "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert torch.cuda.device_count() == 2


@pytest.mark.usefixtures("mapped")
def test_a_device_is_selected_by_number_text_or_object() -> None:
    for given, index in ((1, 1), ("0", 0), ("1", 1), ("cuda:1", 1), (torch.device("cuda:0"), 0)):
        torch.cuda.set_device(given)
        assert torch.cuda.current_device() == index
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.device_count() == 2
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.cuda.set_device(2)
    with pytest.raises(ValueError, match="expected a CUDA device"):
        torch.cuda.set_device("cpu")


def test_a_number_alone_names_a_device_of_cuda_and_nothing_else_changes() -> None:
    without = _device_by_number()
    cuda_on_cpu.install()
    try:
        assert (torch.device(1), torch.device("cpu")) == (torch.device("cuda", 1), torch.device(type="cpu"))
        with torch.device(0):
            assert torch.ones(1).device.type == "cpu"
        for wrong in ("elsewhere", -1, None):
            with pytest.raises((RuntimeError, TypeError)):
                torch.device(wrong)
    finally:
        cuda_on_cpu.uninstall()
    assert _device_by_number() == without


def _device_by_number() -> torch.device | None:
    try:
        return torch.device(0)
    except RuntimeError:  # this torch was built without an accelerator
        return None


@pytest.mark.usefixtures("mapped")
def test_functions_answer_alike_in_the_submodules_that_define_them() -> None:
    torch.cuda.random.set_rng_state(torch.cuda.random.get_rng_state())
    assert len(torch.cuda.random.get_rng_state_all()) == 2
    assert torch.cuda.memory.memory_allocated() > 0
    assert torch.cuda.can_device_access_peer(0, 1)
    torch.cuda.streams.Event(enable_timing=True).record()
    with torch.random.fork_rng([0, 1]):
        torch.rand(3)


@pytest.mark.usefixtures("mapped")
def test_mixed_precision_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about the old spelling
        scalers = [torch.cuda.amp.GradScaler(), torch.amp.GradScaler("cuda")]
        contexts = [torch.cuda.amp.autocast(), torch.autocast("cuda", dtype=torch.float16)]
    x = torch.randn(32, 8, device="cuda")
    y = x.sum(1, keepdim=True)
    losses = []
    for step in range(40):
        scaler, context = scalers[step % 2], contexts[step % 2]
        optimizer.zero_grad()
        with context:
            out = model(x)
            loss = ((out.float() - y) ** 2).mean()
        assert out.dtype == torch.bfloat16
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scalers[0].is_enabled()
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.usefixtures("mapped")
def test_autograd_functions_for_mixed_precision_go_backwards_as_they_came() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            return grad @ weight.T, x.T @ grad

    weight = torch.ones(3, 2, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = Product.apply(torch.ones(4, 3), weight)  # type: ignore[no-untyped-call]
        assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == out.dtype == torch.bfloat16
        torch.set_autocast_enabled("cuda", False)
        assert not torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled(True)
        assert torch.is_autocast_enabled("cpu")
    out.float().sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[4.0, 4.0]] * 3


@pytest.mark.usefixtures("mapped")
def test_a_script_records_and_saves_a_history_of_memory(tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history(max_entries=1000)
    assert torch.cuda.memory_snapshot() == []
    torch.cuda.memory._dump_snapshot(f"{tmp_path}/snapshot.pickle")
    torch.cuda.memory._record_memory_history(enabled=None)
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes())["segments"] == []


@pytest.mark.usefixtures("mapped")
def test_a_torch_that_was_built_for_cuda_looks_for_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizers ask the accelerator's stream since 2.15."""
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() is None
    weight = torch.ones(2, device="cuda", requires_grad=True)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD([weight], lr=0.5).step()
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.processes
def test_a_device_that_is_the_context_is_where_tensors_are_made(tmp_path: Path) -> None:
    """In a process of its own: torch looks once which functions make tensors."""
    script = tmp_path / "contexts.py"
    script.write_text(
        "import torch\n"
        "from torch.utils import _device\n"
        "from opensmd.launch.mapped_cuda import cuda_on_cpu\n"
        "assert not _device._device_constructors.cache_info().currsize\n"
        "cuda_on_cpu.install()\n"
        "for device in ('meta', 'cuda'):\n"
        "    with torch.device(device):\n"
        "        print(torch.nn.Linear(2, 2).weight.device, torch.zeros(1).device)\n"
        "cuda_on_cpu.uninstall()\n"
        "with torch.device('meta'):\n"
        "    print(torch.ones(1).device)\n"
    )
    process = ForkedProcess(as_main, str(script), [], cwd=tmp_path, env=os.environ, stdout=PIPE, stderr=PIPE)
    out, errors = process.communicate(PATIENCE)
    assert out.splitlines() == ["meta meta", "cpu cpu", "meta"], errors


@pytest.mark.usefixtures("mapped")
def test_seeding_cuda_makes_draws_repeat() -> None:
    torch.cuda.manual_seed(3)
    first = torch.rand(4, device="cuda")
    torch.cuda.manual_seed_all(3)
    assert torch.equal(first, torch.rand(4, device="cuda"))
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.cuda.set_rng_state(new_state=state)
    assert torch.equal(first, torch.rand(4))
    torch.cuda.set_rng_state_all(new_states=iter([state, state]))
    assert torch.equal(first, torch.rand(4))
    torch.cuda.default_generators[1].set_state(state)
    assert torch.equal(first, torch.rand(4))


@pytest.mark.usefixtures("mapped")
def test_streams_events_and_memory_answer() -> None:
    start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    stream = torch.cuda.Stream()
    start.record()
    with torch.cuda.stream(stream=stream), torch.cuda.StreamContext(stream):
        x = torch.ones(4, device=stream.device)
    torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end_event=end) > 0
    assert x.sum() == 4
    assert 0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated()
    figures = torch.cuda.memory_stats()
    assert 0 < figures["allocated_bytes.all.current"] <= figures["reserved_bytes.all.peak"]
    assert figures["num_ooms"] == 0
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == 0
    assert torch.cuda.get_allocator_backend() == "native"
    torch.cuda.reset_accumulated_memory_stats()
    torch.cuda._sleep(1_000_000)
    assert torch.cuda.current_stream().cuda_stream == 0
    assert torch._C._cuda_getCurrentRawStream(0) == 0
    assert torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.get_sync_debug_mode() == 0
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.mark("now")


@pytest.mark.usefixtures("mapped")
def test_what_steers_a_profiler_of_cuda_does_nothing() -> None:
    with torch.cuda.profiler.profile():  # type: ignore[no-untyped-call]
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())


@pytest.mark.usefixtures("mapped")
def test_profiles_of_cuda_are_of_the_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    kinds = torch.profiler.ProfilerActivity
    ways = (
        torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]),
        torch.profiler.profile(activities=[kinds.CUDA]),
        torch.autograd.profiler.profile(use_cuda=True),
    )
    for profile in ways:
        with profile:
            torch.ones(2).cuda().add(1)
        assert "aten::add" in profile.key_averages().table(sort_by="cuda_time_total")
    assert "CUDA event" not in capfd.readouterr().err


@pytest.mark.newest
@pytest.mark.usefixtures("mapped")
def test_generators_of_cuda_are_generators_of_the_cpu() -> None:
    for device in ("cuda", "cuda:1", torch.device("cuda", 1), "cpu"):
        generator = torch.Generator(device=device).manual_seed(3)
        assert generator.device.type == "cpu"
        drawn = torch.rand(3, device="cuda", generator=generator)
        assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(3)))
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    assert type(pickle.loads(pickle.dumps(generator))) is type(torch.default_generator)


@pytest.mark.newest
@pytest.mark.usefixtures("mapped")
def test_scripts_find_nccl_and_devices_of_ddp_and_torch_does_not() -> None:
    assert dist.is_nccl_available()
    assert torch.cuda.nccl.version() < (2, 0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        # what torch.compile calls where it finds what it has compiled before
        distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = 8
        group = dist.new_group(backend="nccl", pg_options=options)
        assert not isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupNCCL)
        assert dist.get_backend(group) == "smddp"
        inner = nn.Linear(2, 3)
        for given in ([1], ["cuda:1"]):
            model = nn.parallel.DistributedDataParallel(inner, device_ids=given)
            assert model.device_ids == [1] and model.output_device == 1
            assert torch.equal(model(torch.ones(1, 2)), inner(torch.ones(1, 2)))
        assert nn.parallel.DistributedDataParallel(inner).device_ids is None
    finally:
        distributed_c10d._abort_process_group()


@pytest.mark.usefixtures("mapped")
def test_torchs_compiler_reads_what_device_there_is() -> None:
    from torch._inductor.codecache import CacheBase

    # torch built for CUDA asks for another name than one for the CPU
    names = ("", torch.cuda.get_device_name(0))
    assert CacheBase.get_system.__wrapped__()["device"]["name"] in names  # type: ignore[attr-defined]


@pytest.mark.usefixtures("mapped")
def test_a_file_is_loaded_to_the_cpu_whatever_it_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": torch.ones(2)}, path)
    ways = (lambda storage, _: storage, lambda storage, _: storage.cuda(1))
    for where in (None, "cuda:0", torch.device("cuda"), {"cuda:0": "cuda:1"}, *ways):
        assert torch.load(f=path, map_location=where)["x"].device.type == "cpu"
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(2)), path)  # type: ignore[no-untyped-call]
    for where in (None, "cuda:0", torch.device("cuda")):
        assert torch.jit.load(path, map_location=where).weight.device.type == "cpu"  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("nccl", "smddp"),
        ("cpu:gloo,cuda:nccl", "smddp"),
        ("NCCL", "smddp"),
        ("gloo", "gloo"),
        ("smddp", "smddp"),
        (None, None),
    ],
)
def test_nccl_becomes_smddp(given: str | None, expected: str | None) -> None:
    assert _without_nccl(given) == expected
    assert _without_nccl(given, "smddp") == (expected or "smddp")


@pytest.mark.parametrize(
    ("given", "expected"),
    [("cuda", "cpu"), ("cuda:3", "cpu"), ("cpu", "cpu"), ("meta", "meta"), (None, None), (True, True)],
)
def test_only_cuda_is_translated(given: object, expected: object) -> None:
    assert without_cuda(given) == expected


def test_a_barrier_keeps_its_timeout_and_forgets_its_devices() -> None:
    given: dict[str, object] = {}
    barrier = _barrier_without_devices(lambda **arguments: given.update(arguments))
    barrier(None, True, [0], timedelta(seconds=3))
    assert given == {"group": None, "async_op": True, "timeout": timedelta(seconds=3)}


def test_no_device_means_the_current_one() -> None:
    assert device_index(None, 1, 2) == 1
    assert device_index("cuda", 1, 2) == 1
    assert device_index(-1, 1, 2) == 1

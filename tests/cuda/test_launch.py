"""``smdrun`` and ``smd`` on a machine with a GPU: scripts that use it, that do not, and ``--device cpu``.

All jobs start at once: most of their time goes into starting interpreters.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.cuda.test_collectives import Gpus
from tests.scripts.test_smddp_scripts import environment
from tests.support.cuda import DEVICE, ENVIRONMENT, MAPPED
from tests.support.jobs import both
from tests.support.launchers import BOTH, assert_trained
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import ROOT
from tests.support.scripts import run_as_main

SMDDP = ROOT / "tests" / "scripts" / "smddp"
SMDRUN = [sys.executable, "-m", "opensmd.launch.cli"]
SMD = [sys.executable, "-m", "opensmd.tools.cli"]
ON_CPU = ["--device", "cpu"]
ON_GPU = ON_CPU if MAPPED else []
DEVICES = 1 if MAPPED else torch.cuda.device_count()
Done = subprocess.CompletedProcess[str]
Jobs = dict[str, Future[Done]]


def run(command: Sequence[object], *, cwd: Path, **env: str) -> Done:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment(**ENVIRONMENT, PYTHONPATH=paths, **env),
        capture_output=True,
        text=True,
        timeout=PATIENCE / 2,
        check=False,
    )


def succeeded(done: Done) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


USES_ITS_GPU = """
import json
import os
import torch
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("smddp")
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Linear(4, 1).cuda(), device_ids=[torch.cuda.current_device()]
)
rows = torch.utils.data.TensorDataset(torch.ones(8, 4))
loader = torch.utils.data.DataLoader(rows, 4, num_workers=1, pin_memory=True)
for (batch,) in loader:
    pinned = batch.is_pinned()
    model(batch.to("cuda", non_blocking=True)).sum().backward()
total = torch.ones(1, device="cuda")
dist.all_reduce(total)
dist.barrier(device_ids=[torch.cuda.current_device()])
print("found " + json.dumps({
    "gradient": model.module.weight.grad[0, 0].item(), "sum": total.item(), "pinned": pinned,
    "device": total.device.type, "gpus": os.environ["SM_NUM_GPUS"], "size": dist.get_world_size(),
}))
dist.destroy_process_group()
"""


def on_every_gpu(folder: Path) -> Done:
    (folder / "train.py").write_text(USES_ITS_GPU)
    return run([*SMDRUN, *(["-n", 1] if MAPPED else []), *ON_GPU, "train.py"], cwd=folder)


AS_TEXT = 'os.environ["LOCAL_RANK"]'

HIDES_THE_GPU = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
assert dist.get_backend() == "smddp"
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
torch.cuda.set_device(dist.get_rank())
torch.cuda.manual_seed(5)
first = torch.randn(3, device="cuda")
torch.manual_seed(5)
assert torch.equal(torch.randn(3).cuda(), first)
with torch.device("cuda"):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
model = torch.nn.parallel.DistributedDataParallel(model.to("cuda:1"), device_ids=[dist.get_rank()])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
rows = torch.utils.data.TensorDataset(torch.ones(8, 4))
loader = torch.utils.data.DataLoader(rows, 4, num_workers=2, pin_memory=True, persistent_workers=True)
for _ in range(2):
    for (batch,) in loader:
        assert batch.pin_memory() is batch  # to ask whether it is pinned would begin to use the GPU
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(batch.cuda(non_blocking=True)).float().square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
inputs = torch.ones(2, 4, requires_grad=True)
torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=False).sum().backward()
total = torch.ones(1, pin_memory=True, device="cuda")
dist.all_reduce(total)
dist.barrier()
torch.set_default_device("cuda")
assert {tensor.device.type for tensor in (torch.empty(2), total, loss, *model.parameters())} == {"cpu"}
try:
    context = torch._C._cuda_hasPrimaryContext(0)
except (AttributeError, RuntimeError):  # torch without CUDA, or that has not begun to use it
    context = False
print("context", context, total.item())
dist.destroy_process_group()
"""


def hidden(folder: Path) -> Done:
    (folder / "train.py").write_text(HIDES_THE_GPU)
    return run([*SMDRUN, "-n", 2, *ON_CPU, "train.py"], cwd=folder)


def beside_a_gpu(folder: Path) -> Done:
    return run([*SMDRUN, "-n", 2, BOTH], cwd=folder)


def on_two_hosts(folder: Path) -> Done:
    """The guide's script, on hosts with a rank and a GPU each, which is one and the same here.

    It gives LOCAL_RANK to torch as text, which torch takes for no device.
    """
    text = (SMDDP / "mnist_smddp.py").read_text()
    assert text.count(AS_TEXT) == 1
    (folder / "mnist_smddp.py").write_text(text.replace(AS_TEXT, f"int({AS_TEXT})"))
    shutil.copy(SMDDP / "digits.py", folder)
    secret = folder / "secret"
    secret.write_text("known to both hosts alone\n")
    secret.chmod(0o600)
    hosts = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port(), "--node-rank"]
    script = ["mnist_smddp.py", "--epochs", 2]

    def host(node: int) -> Done:
        own = {"NCCL_HOSTID": f"host-{node}", "OPENSMD_JOB_SECRET_FILE": str(secret)}
        options = ["-n", 1, *hosts, node, "--output", folder / str(node)]
        return run([*SMDRUN, *ON_GPU, *options, *script], cwd=folder, **own)

    first, second = both(lambda: host(0), lambda: host(1))
    succeeded(second)
    return first


def doctor(folder: Path) -> Done:
    return run([*SMD, "doctor", "--json"], cwd=folder)


def bench(folder: Path) -> Done:
    options = ["--bytes", "4096", "--seconds", "0.1", "--json"]
    return run([*SMD, "bench", "all_reduce", "send_recv", *options], cwd=folder)


STARTS: list[Callable[[Path], Done]] = [on_every_gpu, hidden, beside_a_gpu, on_two_hosts, doctor, bench]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with ThreadPoolExecutor(len(STARTS)) as threads:
        yield {
            start.__name__: threads.submit(start, tmp_path_factory.mktemp(start.__name__)) for start in STARTS
        }


def test_smdrun_starts_a_rank_for_each_gpu_which_uses_it(jobs: Jobs) -> None:
    printed = succeeded(jobs["on_every_gpu"].result())
    found = [json.loads(text) for text in re.findall(r"found (\{.*\})", printed)]
    wanted = {"gradient": 8.0, "sum": float(DEVICES), "pinned": not MAPPED, "device": DEVICE}
    assert found == [{**wanted, "gpus": str(DEVICES), "size": DEVICES}] * DEVICES


def test_device_cpu_hides_the_gpu_that_is_there(jobs: Jobs) -> None:
    printed = succeeded(jobs["hidden"].result())
    assert sorted(printed.splitlines()) == ["[0] context False 2.0", "[1] context False 2.0"]


def test_scripts_that_use_the_cpu_train_beside_a_gpu_as_without(jobs: Jobs) -> None:
    assert_trained(succeeded(jobs["beside_a_gpu"].result()), [2])


def test_the_smddp_script_of_the_guide_trains_in_mixed_precision_on_two_hosts(jobs: Jobs) -> None:
    done = jobs["on_two_hosts"].result()
    accuracies = [float(match) for match in re.findall(r"accuracy ([\d.]+)", succeeded(done))]
    assert len(accuracies) == 2
    assert accuracies[-1] > 0.3  # by chance 0.1; nothing seeds the weights
    saved = Path(done.args[done.args.index("--output") + 1]) / "model" / "model.pt"
    assert saved.stat().st_size > 10_000


def on_own_host(script: str, options: list[str], env: dict[str, str]) -> str:
    """On a rank: a script as on a host of one GPU, so that what it calls its first is the one there is."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**local, **env}.items():
            patch.setenv(name, value)
        patch.setenv("OMPI_COMM_WORLD_RANK", rank)
        patch.setenv("OMPI_COMM_WORLD_SIZE", size)
        patch.setenv("OPENSMD_HOST_ID", f"host {rank}")
        return run_as_main(script, options)


def run_script(gpus: Gpus, script: Path, *options: object, **env: str) -> str:
    """What two ranks printed, each on a host of its own."""
    return "".join(
        gpus(2).run(on_own_host, str(script), list(map(str, options)), env, backend=None, timeout=60)
    )


def test_the_v1_script_of_the_guide_trains_on_cuda(gpus: Gpus, tmp_path: Path) -> None:
    printed = run_script(gpus, SMDDP / "mnist_v1.py", "--epochs", 2, SM_MODEL_DIR=str(tmp_path))
    accuracies = [float(match) for match in re.findall(r"accuracy ([\d.]+)", printed)]
    assert accuracies[-1] > 0.7
    assert printed.count("same model on all ranks: True") == 2


def test_helpers_of_detection_code_work_on_cuda(gpus: Gpus) -> None:
    assert run_script(gpus, SMDDP / "detection_v1.py").count("same model: True") == 2


def test_a_throughput_script_times_cuda_by_events(gpus: Gpus) -> None:
    port = str(free_port() - 2)
    printed = run_script(gpus, SMDDP / "throughput.py", SMDATAPARALLEL_SERVER_PORT=port)
    assert printed.count("sum 32.0") == 2


@pytest.mark.parametrize(
    ("settings", "amp"), [("partitions=2,microbatches=2", 1), ("partitions=1,ddp=True", 0)]
)
def test_the_mnist_like_script_of_smp_learns_on_cuda(gpus: Gpus, settings: str, amp: int) -> None:
    env = {"SM_HP_MP_PARAMETERS": json.dumps(dict(pair.split("=") for pair in settings.split(",")))}
    script = ROOT / "tests" / "scripts" / "smp" / "mnist_cuda.py"
    printed = run_script(gpus, script, "--amp", amp, **env)
    accuracies = [float(match) for match in re.findall(r"accuracy ([\d.]+)", printed)]
    assert accuracies and min(accuracies) > 0.8


def test_smd_doctor_says_which_devices_there_are(jobs: Jobs) -> None:
    findings = json.loads(succeeded(jobs["doctor"].result()))
    (of_torch,) = [finding["text"] for finding in findings if finding["what"] == "torch"]
    devices = f"{DEVICES} device{'s' if DEVICES > 1 else ''}"
    there = "CPU only" if MAPPED else f"CUDA {torch.version.cuda}, {devices}"
    assert of_torch.startswith(f"{torch.__version__} ({there})")


def test_smd_bench_measures_tensors_of_the_cpu_beside_a_gpu(jobs: Jobs) -> None:
    found = json.loads(succeeded(jobs["bench"].result()))
    assert found["ranks"] == 2
    assert [case["wrong"] for case in found["results"]] == [0] * 4

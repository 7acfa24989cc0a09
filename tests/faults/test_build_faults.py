"""Builds that meet each other, are killed, or have no compiler; and a /dev/shm that is too small."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from opensmd.native import recipe
from opensmd.native.build import build
from tests.support.forked_jobs import run_job, start_job
from tests.support.forks import ForkedProcess, as_main
from tests.support.namespaces import mount_over
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
# Compiles each file in no time and links nothing, so that builds themselves can be tested in seconds.
QUICK_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo quick 1.0; exit 0; fi
echo call >> "$CALLS"
sleep "$SECONDS_A_CALL"
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then echo built > "$2"; fi
  shift
done
"""


def compiler(folder: Path, *, seconds: float) -> dict[str, str]:
    path = folder / "quick-cxx"
    path.write_text(QUICK_COMPILER)
    path.chmod(0o755)
    return {
        **os.environ,
        "CXX": str(path),
        "CALLS": str(folder / "calls"),
        "SECONDS_A_CALL": str(seconds),
        "OPENSMD_CACHE_DIR": str(folder / "cache"),
    }


def print_library() -> None:
    os.setsid()
    print(build())


def start_build(env: dict[str, str]) -> ForkedProcess:
    return ForkedProcess(print_library, cwd=ROOT, env=env, stdout=PIPE, stderr=PIPE)


def output(process: ForkedProcess) -> str:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out.strip()


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name.startswith("building-")]


def test_two_processes_that_build_at_once_compile_once(tmp_path: Path) -> None:
    env = compiler(tmp_path, seconds=0.05)
    first, second = start_build(env), start_build(env)
    assert output(first) == output(second)
    calls = (tmp_path / "calls").read_text().count("call")
    assert output(start_build(env)).endswith("opensmd_native.so")
    assert (tmp_path / "calls").read_text().count("call") == calls
    assert calls == len(recipe.units()) + len(["the library"])
    assert leftovers(tmp_path / "cache") == []


def test_a_killed_build_holds_nobody_up_and_is_cleaned_away(tmp_path: Path) -> None:
    slow = compiler(tmp_path, seconds=10 * PATIENCE)
    victim = start_build(slow)
    calls = tmp_path / "calls"
    deadline = time.monotonic() + PATIENCE
    while not calls.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert leftovers(tmp_path / "cache") != []
    quick = {**slow, "SECONDS_A_CALL": "0"}
    assert output(start_build(quick)).endswith("opensmd_native.so")
    assert leftovers(tmp_path / "cache") == []


def test_an_old_locale_builds_the_same(tmp_path: Path) -> None:
    env = compiler(tmp_path, seconds=0)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    # An interpreter reads them when it starts.
    command = [sys.executable, "-c", "from opensmd.native.build import build; print(build())"]
    done = subprocess.run(command, cwd=ROOT, env={**env, **ascii_only}, capture_output=True, text=True)
    assert done.stdout.strip() == output(start_build(env)), done.stderr


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    env = compiler(tmp_path, seconds=0)
    Path(env["CXX"]).write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo bad 1.0; exit 0; fi\necho "no such luck" >&2\nexit 3\n'
    )
    done = run_job([sys.executable, "-m", "opensmd.native.build"], cwd=ROOT, env=env)
    assert done.returncode == 1
    assert "no such luck" in done.stderr and "bad 1.0" in done.stderr
    assert leftovers(tmp_path / "cache") == []


TWO_RANKS = """
import os, sys, warnings, torch, torch.distributed as dist, torch.multiprocessing as mp
from datetime import timedelta

def main(rank, port):
    torch.set_num_threads(1)
    if rank == 0:
        warnings.simplefilter("always")
    import smdistributed.dataparallel.torch.torch_smddp
    dist.init_process_group("smddp", init_method=f"file://{port}", rank=rank, world_size=2,
                            timeout=timedelta(seconds=240))
    tensor = torch.full((COUNT,), float(rank + 1))
    dist.all_reduce(tensor)
    assert bool((tensor == 3).all())
    dist.barrier(group=dist.new_group())  # Gloo's ranks still connect to each other when one has its group
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    print(rank, type(backend).__name__, flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(main, (sys.argv[1],), nprocs=2, start_method="fork")
"""


def as_before() -> None:
    """The ranks are given what every process is given."""


def limit_address_space() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8_000_000 << 10,) * 2)


def give_a_tiny_dev_shm() -> None:
    mount_over("/dev/shm", "tmpfs", "size=1m")


def run_prepared(prepare: Callable[[], None], script: str, store: str) -> None:
    prepare()
    as_main(script, [store])


def run_two_ranks(
    folder: Path, env: dict[str, str], *, count: int, prepare: Callable[[], None] = as_before
) -> tuple[str, str]:
    script = folder / "two_ranks.py"
    script.write_text(TWO_RANKS.replace("COUNT", str(count)))
    main = (run_prepared, prepare, str(script), str(folder / "store"))
    job = ForkedProcess(*main, cwd=folder, env=env, stdout=PIPE, stderr=PIPE)
    out, err = job.communicate(PATIENCE)
    assert job.returncode == 0, err
    return out, err


def test_without_a_compiler_one_warning_says_what_to_install_and_gloo_serves_the_group(
    tmp_path: Path,
) -> None:
    env = {**os.environ, "PATH": str(tmp_path), "OPENSMD_CACHE_DIR": str(tmp_path / "cache")}
    env.pop("CXX", None)
    out, err = run_two_ranks(tmp_path, env, count=1000)
    assert out.count("ProcessGroupGloo") == 2
    assert err.count("RuntimeWarning") == 1
    assert "apt-get install g++" in err


def test_the_core_can_be_switched_off(tmp_path: Path) -> None:
    out, err = run_two_ranks(tmp_path, {**os.environ, "OPENSMD_NATIVE": "0"}, count=10)
    assert out.count("ProcessGroupGloo") == 2
    assert "OPENSMD_NATIVE=0" in err


HELLO = """
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group("smddp")
dist.barrier()
dist.destroy_process_group()
"""


def running_in_session(session: int) -> list[str]:
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(one.pid) == session and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.name())
    return found


def test_what_kept_smdrun_from_building_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    env = {**os.environ, "PATH": str(tmp_path), "OPENSMD_CACHE_DIR": str(tmp_path / "cache")}
    env.pop("CXX", None)
    done = run_job(["smdrun", "-n", "2", "hello.py"], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no C++ compiler was found") == 1
    assert "smdrun could not build it, and has said why" in done.stderr
    assert "OPENSMD_NATIVE" not in done.stderr


def test_a_signal_to_smdrun_ends_the_compilers(tmp_path: Path) -> None:
    env = compiler(tmp_path, seconds=10 * PATIENCE)
    (tmp_path / "hello.py").write_text(HELLO)
    job = start_job(["smdrun", "-n", "2", "hello.py"], cwd=tmp_path, env=env)
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "calls").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(PATIENCE)
    assert job.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in err
    deadline = time.monotonic() + PATIENCE
    while (left := running_in_session(job.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)  # a process ends some time after it was killed
    assert left == []
    assert leftovers(tmp_path / "cache") == []


def test_a_limit_on_address_space_makes_the_arena_smaller(tmp_path: Path) -> None:
    out, err = run_two_ranks(tmp_path, dict(os.environ), count=100_000, prepare=limit_address_space)
    assert out.count("SmddpBackend") == 2, err


def test_a_dev_shm_of_one_mebibyte_is_enough(tmp_path: Path) -> None:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("this user may not make mount namespaces")
    out, err = run_two_ranks(tmp_path, dict(os.environ), count=5_000_000, prepare=give_a_tiny_dev_shm)
    assert out.count("SmddpBackend") == 2, err

"""``python -m torch.distributed.deprecated.launch`` with whole scripts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.forked_jobs import run_job, start_job
from tests.support.forks import ForkedProcess, as_main
from tests.support.jobs import both
from tests.support.patience import PATIENCE
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tests/scripts/legacy/train.py"
TUTORIAL = "tests/scripts/legacy/tutorial.py"


LAUNCH = [sys.executable, "-m", "torch.distributed.deprecated.launch"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENSMD_LEGACY_TIMEOUT": str(PATIENCE)}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The launcher and its ranks in forks."""
    return run_job([*LAUNCH, *arguments], cwd=ROOT, env=environment())


def test_a_script_of_2018_trains_on_two_processes_to_the_same_weights() -> None:
    command = [*LAUNCH, "--nproc_per_node=2", f"--master_port={free_port()}", SCRIPT]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split(":")[0] for line in lines] == ["rank 0 local 0", "rank 1 local 1"]
    assert len({line.split(": ")[1] for line in lines}) == 1


def test_two_nodes_make_one_job() -> None:
    common = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    first, second = (
        [*common, f"--node_rank={node}", SCRIPT, "--backend=gloo", "--place"] for node in range(2)
    )
    nodes = both(lambda: run(*first), lambda: run(*second))
    assert [node.returncode for node in nodes] == [0, 0], nodes
    assert [node.stdout for node in nodes] == ["rank 0 local 0: 2.0\n", "rank 1 local 0: 2.0\n"]


def test_a_failing_rank_ends_the_others_with_its_exit_code() -> None:
    done = run("--nproc_per_node=2", f"--master_port={free_port()}", SCRIPT, "--fail=1")
    assert done.returncode == 23
    assert "local rank 1" in done.stderr and "exit code 23" in done.stderr


def test_use_env_and_module_and_programs() -> None:
    # one write a line: the processes share the pipe
    text = "' '.join([os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:4], os.linesep])"
    show = f"import os, sys; os.write(1, {text}.encode())"
    timed = ["--nproc_per_node=2", "--use_env", "-m", "timeit", "-n1", "-r1", "-s", show, "0"]
    shown = ["--use_env", "--no_python", "sh", "-c", "echo $RANK of $WORLD_SIZE"]
    jobs = [run(*arguments) for arguments in (timed, shown, ["--no_python", "sh"])]
    module, program, refused = ((job.returncode, job.stdout, job.stderr) for job in jobs)
    # what timeit itself prints may come in the middle of a line
    assert sorted(re.findall(r"\d 2 -n1 -r1 -s", module[1])) == ["0 2 -n1 -r1 -s", "1 2 -n1 -r1 -s"], module
    assert program[:2] == (0, "0 of 1\n")
    assert refused[0] == 2 and "--use_env" in refused[2]


def test_a_launcher_that_is_asked_to_end_ends_its_processes() -> None:
    program = "echo started $$; exec sleep 1000"
    arguments = ["--use_env", "--no_python", "sh", "-c", program]
    launcher = start_job([*LAUNCH, *arguments], cwd=ROOT, env=environment())
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline().split()[1])
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE) == 128 + signal.SIGTERM
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_scripts_start_under_torchs_own_launcher_too() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_job([*command, SCRIPT, "--backend=gloo", "--place"], cwd=ROOT, env=env)
    assert sorted(line.split(" local")[0] for line in done.stdout.splitlines()) == ["rank 0", "rank 1"], (
        done.stderr
    )


def test_the_example_of_2017_learns(tmp_path: Path) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        ForkedProcess(
            as_main,
            "examples/legacy/digits_2017.py",
            [f"--local_rank={rank}", "--epochs=5"],
            cwd=ROOT,
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=tmp_path / f"out-{rank}",
            stderr=tmp_path / f"errors-{rank}",
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        assert process.wait(PATIENCE) == 0, (tmp_path / f"errors-{rank}").read_text()
    out = (tmp_path / "out-0").read_text()
    assert float(out.splitlines()[-1].rpartition(" ")[2]) > 0.85, out


def test_the_tutorial_of_2017_runs_in_processes_that_it_forks_itself(tmp_path: Path) -> None:
    size = 4  # where neighbours in a ring differ, and a group of two is not the world
    out, errors = tmp_path / "out", tmp_path / "errors"
    env = environment()
    arguments = [str(size), str(free_port())]
    script = ForkedProcess(as_main, TUTORIAL, arguments, cwd=ROOT, env=env, stdout=out, stderr=errors)
    assert script.wait(PATIENCE) == 0, errors.read_text()
    assert errors.read_text() == ""
    # unbuffered, the processes' lines may end in one another's
    said = re.findall(r"Rank (\d+) loss (\d+\.\d{3}) checksum (-?\d+\.\d{9})", out.read_text())
    assert sorted(int(rank) for rank, _, _ in said) == list(range(size)), out.read_text()
    assert len({checksum for _, _, checksum in said}) == 1
    assert all(float(loss) < 1.2 for _, loss, _ in said)

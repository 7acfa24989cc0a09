"""Whole user scripts, unmodified, under every launcher; and what is left and said when one of them fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.support.forked_jobs import run_job, start_job
from tests.support.jobs import both
from tests.support.patience import PATIENCE, wait_until
from tests.support.ports import free_port

SCRIPTS = Path(__file__).parent / "smddp"
BIN = Path(sys.executable).parent
RANK = [sys.executable, "-m", "opensmd.launch.rank"]
LAUNCHERS = {
    "smdrun": [str(BIN / "smdrun"), "-n", "2"],
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"],
    "mpiexec": [str(BIN / "mpiexec"), "-n", "2", sys.executable],
}
ON_CPU = {
    "smdrun": [*LAUNCHERS["smdrun"], "--device", "cpu"],
    "torchrun": [*LAUNCHERS["torchrun"], "-m", "opensmd.launch.rank", "--device", "cpu"],
    "mpiexec": [*LAUNCHERS["mpiexec"], "-m", "opensmd.launch.rank", "--device", "cpu"],
}
_OF_A_RANK = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_|MASTER_|MALLOC_|OPENSMD_FILLED|SM_|SMDATAPARALLEL|OMP_|OMPI_|PMI|SLURM)"
)


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without anything that a launcher or the library added."""
    return {**{name: value for name, value in os.environ.items() if not _OF_A_RANK.match(name)}, **extra}


def run(command: list[str], *, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def job(
    command: list[str], *, cwd: Path, fork_ranks: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """What :func:`run` does, in forks."""
    return run_job(command, cwd=cwd, env=environment(**env), fork_ranks=fork_ranks)


def places(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What each rank said about itself, by rank."""
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(text) for text in re.findall(r"place (\{.*?\})", done.stdout)]
    return sorted(said, key=lambda each: each["rank"])


@pytest.fixture(scope="module")
def found_under_smdrun(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of smdrun says about itself, which is started once for all that asks about it."""
    command = [*LAUNCHERS["smdrun"], str(SCRIPTS / "place.py")]
    return places(run(command, cwd=tmp_path_factory.mktemp("smdrun")))


WHERE_RANKS_MEET = """
import os
from opensmd.environment import variables
variables.fill()
print("port", os.environ["MASTER_PORT"], flush=True)
"""


def test_two_mpi_jobs_at_once_do_not_meet(tmp_path: Path) -> None:
    command = [*LAUNCHERS["mpiexec"], "-c", WHERE_RANKS_MEET]
    jobs = [
        subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [job.communicate(timeout=PATIENCE)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    ports = [set(re.findall(r"port (\d+)", output)) for output in outputs]
    assert all(len(port) == 1 for port in ports)
    assert ports[0] != ports[1]


def test_two_smdruns_with_one_secret_make_one_job_of_a_module(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("known to both hosts alone\n")
    secret.chmod(0o600)
    port = str(free_port())
    hosts = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]

    def host(node: int) -> subprocess.CompletedProcess[str]:
        command = [
            str(BIN / "smdrun"),
            "-n",
            "1",
            *hosts,
            str(node),
            "--output",
            str(tmp_path),
            "-m",
            "place",
        ]
        return job(command, cwd=SCRIPTS, OPENSMD_JOB_SECRET_FILE=str(secret))

    done = both(lambda: host(0), lambda: host(1))
    assert [one.returncode for one in done] == [0, 0], done
    for node, one in enumerate(done):
        assert one.stdout.startswith(f"[{node}] place ")
        place = json.loads(one.stdout.partition("place ")[2])
        assert (place["rank"], place["size"], place["sum"], place["LOCAL_RANK"]) == (node, 2, 2.0, "0")
        assert json.loads(place["SM_HOSTS"]).index(place["SM_CURRENT_HOST"]) == node


def test_failed_ranks_are_started_again_as_often_as_asked(tmp_path: Path) -> None:
    script = tmp_path / "flaky.py"
    script.write_text(
        "import os, pathlib\n"
        "tries = pathlib.Path('tries')\n"
        "tries.write_text(tries.read_text() + '.' if tries.exists() else '.')\n"
        "if len(tries.read_text()) < 3:\n"
        "    raise RuntimeError(f'try {len(tries.read_text())}')\n"
        "print('done after', len(tries.read_text()), os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    command = [str(BIN / "smdrun"), "-n", "1", "--max-restarts", "2", "flaky.py"]
    done = job(command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[0] done after 3 2\n"), done.stderr
    assert [line for line in done.stderr.splitlines() if "RuntimeError: try" in line] == [
        "[0] RuntimeError: try 1",
        "[0] RuntimeError: try 2",
    ]


def test_a_process_started_by_hand_is_a_group_of_one(tmp_path: Path) -> None:
    (place,) = places(run([sys.executable, str(SCRIPTS / "place.py")], cwd=tmp_path))
    assert (place["rank"], place["size"], place["sum"]) == (0, 1, 1.0)


def test_smdrun_pins_ranks_apart_and_divides_the_threads(found_under_smdrun: list[dict[str, Any]]) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    found = found_under_smdrun
    if len(allowed) >= 2:
        assert not set(found[0]["cpus"]) & set(found[1]["cpus"])
    assert all(set(item["cpus"]) <= set(allowed) for item in found)
    assert int(found[0]["OMP_NUM_THREADS"]) >= 1


def test_ranks_of_smdrun_exempt_what_torch_made_from_collections(
    found_under_smdrun: list[dict[str, Any]],
) -> None:
    assert all(one["exempt_from_collections"] > 10_000 for one in found_under_smdrun)


def test_an_affinity_of_the_users_is_kept(tmp_path: Path) -> None:
    command = [*LAUNCHERS["smdrun"], str(SCRIPTS / "surroundings.py")]
    allowed = sorted(os.sched_getaffinity(0))
    unbound, narrow = both(
        lambda: job(command, cwd=tmp_path, fork_ranks=False, OMP_PROC_BIND="false"),
        lambda: run(["taskset", "-c", str(allowed[-1]), *command], cwd=tmp_path),
    )
    assert [place["cpus"] for place in places(unbound)] == [allowed] * 2
    assert [place["cpus"] for place in places(narrow)] == [[allowed[-1]]] * 2


def test_ranks_of_smdrun_keep_the_memory_that_every_step_needs_unless_the_user_chose(tmp_path: Path) -> None:
    def faults(**env: str) -> int:
        command = [str(BIN / "smdrun"), "-n", "1", str(SCRIPTS / "page_faults.py")]
        done = job(command, cwd=tmp_path, fork_ranks=False, **env)
        (found,) = re.findall(r"faults (\d+)", done.stdout)
        return int(found)

    kept, given_back = faults(), faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert given_back > 200  # in ten steps; one takes 36 huge pages or 18432 usual ones
    assert kept <= given_back / 10  # the heap may still grow once, by less than a step


def train_guide(launcher: str, script: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    """The job of one of the guide's scripts, and how often its model is right after two epochs."""
    (folder / "model").mkdir()
    command = [*ON_CPU[launcher], str(SCRIPTS / script), "--epochs", "2"]
    done = (run if launcher == "mpiexec" else job)(command, cwd=folder, SM_MODEL_DIR=str(folder / "model"))
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = [float(match) for match in re.findall(r"accuracy ([\d.]+)", done.stdout)]
    assert len(accuracies) == 2
    assert (folder / "model" / "model.pt").stat().st_size > 10_000
    return done, accuracies[-1]


@pytest.mark.parametrize("launcher", ON_CPU)
def test_the_v1_script_of_the_guide_trains(launcher: str, tmp_path: Path) -> None:
    done, accuracy = train_guide(launcher, "mnist_v1.py", tmp_path)
    assert accuracy > 0.7
    assert done.stdout.count("same model on all ranks: True") == 2
    assert "use torch.nn.parallel.DistributedDataParallel" in done.stderr


def test_the_smddp_script_of_the_guide_trains_in_mixed_precision(tmp_path: Path) -> None:
    """Under smdrun; that mpiexec starts such a script is asked in ``test_launchers``."""
    _, accuracy = train_guide("smdrun", "mnist_smddp.py", tmp_path)
    assert accuracy > 0.6


def test_a_script_that_chooses_its_own_port_does_not_wait_for_the_launchers(tmp_path: Path) -> None:
    port = str(free_port() - 2)
    done = job(
        [*ON_CPU["smdrun"], str(SCRIPTS / "throughput.py")], cwd=tmp_path, SMDATAPARALLEL_SERVER_PORT=port
    )
    assert sorted(done.stdout.splitlines()) == ["[0] sum 32.0", "[1] sum 32.0"], done.stderr


def test_helpers_of_detection_code_work_and_only_rank_0_warns_of_the_v1_interface(tmp_path: Path) -> None:
    done = job([*ON_CPU["smdrun"], str(SCRIPTS / "detection_v1.py")], cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[0] same model: True", "[1] same model: True"], done.stderr
    assert "[0]" in done.stderr and "all_gather is deprecated since 1.4.0" in done.stderr
    assert "[1]" not in done.stderr


def test_the_same_script_runs_without_the_library_in_a_local_run(tmp_path: Path) -> None:
    script = str(SCRIPTS / "local_or_distributed.py")
    alone, distributed = both(
        lambda: run([sys.executable, script], cwd=tmp_path),
        lambda: job([*LAUNCHERS["smdrun"], script], cwd=tmp_path),
    )
    assert (alone.returncode, alone.stdout) == (0, "local: False 1\n")
    assert sorted(distributed.stdout.splitlines()) == [
        "[0] distributed: rank 0 of 2, sum 1.0",
        "[1] distributed: rank 1 of 2, sum 1.0",
    ]


def test_smdrun_sets_what_a_container_sets_binds_if_wanted_and_leaves_no_empty_folders(
    tmp_path: Path,
) -> None:
    command = [*ON_CPU["smdrun"], "--no-bind", str(SCRIPTS / "surroundings.py")]
    found = places(job(command, cwd=tmp_path, fork_ranks=False, OMP_NUM_THREADS="3"))
    assert [item["cpus"] for item in found] == [sorted(os.sched_getaffinity(0))] * 2
    assert [item["OMP_NUM_THREADS"] for item in found] == ["3", "3"]
    assert found[0]["SM_MODEL_DIR"] == str(tmp_path / "output" / "model")
    assert found[0]["SM_NUM_GPUS"] == "2"
    assert [item["OMPI_COMM_WORLD_LOCAL_RANK"] for item in found] == ["0", "1"]
    assert list(tmp_path.iterdir()) == []


def leftovers(folder: Path) -> list[psutil.Process]:
    """Living processes that work in this folder."""
    found = []
    for process in psutil.process_iter(["cwd", "status"]):
        if process.info["cwd"] == str(folder) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while (left := leftovers(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        process.kill()
    assert left == []


def test_ranks_of_mpirun_start_through_the_commands_of_a_container(tmp_path: Path) -> None:
    command = str(BIN / "smddpmprun")
    wrapper = [*LAUNCHERS["mpiexec"][:-1], command, "-i", "ml.p4d.24xlarge", "--allow-bypass"]
    script = [sys.executable, "-m", "mpi4py", str(SCRIPTS / "place.py")]
    tuned = [
        "SMDDP_AG_SCRATCH_BUFFER_SIZE",
        "SMP_D2D_GPU_BUFFER_SIZE_BYTES",
        "SMP_DISABLE_D2D",
        "SMP_ENABLE_CROSS_NODE_D2D",
        "SMP_NCCL_THROTTLE_LIMIT",
    ]
    done = run([*wrapper, *script], cwd=tmp_path, **dict.fromkeys(tuned, "1"))
    assert [(rank["rank"], rank["sum"], rank["LOCAL_RANK"]) for rank in places(done)] == [
        (0, 2.0, "0"),
        (1, 2.0, "1"),
    ]
    assert done.stderr.count(f"have no effect here: {', '.join(tuned)}.") == 1, done.stderr


def test_a_container_s_command_runs_a_program_alone_and_names_one_that_is_not_there(tmp_path: Path) -> None:
    wrapper = [str(BIN / "smddprun")]
    program = ["sh", "-c", 'echo "$RANK $LOCAL_RANK $WORLD_SIZE"; exit 3']
    done = run([*wrapper, *program], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "0 0 1\n")
    done = run([*wrapper, "train.py", "--lr", "0.1"], cwd=tmp_path)
    assert done.returncode == 127
    assert "train.py: No such file or directory; expected a program, such as python train.py" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="only a machine without CUDA gives this advice")
def test_a_script_that_hard_codes_cuda_is_told_how_to_run_without_it(tmp_path: Path) -> None:
    done = job([*LAUNCHERS["smdrun"], str(SCRIPTS / "detection_v1.py")], cwd=tmp_path)
    assert done.returncode == 1
    assert "smdrun: there is no CUDA device here; --device cpu runs scripts" in done.stderr


@pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None,
    reason="to a torch that is built for an accelerator, a number alone names a device of that",
)
def test_without_the_core_a_script_that_gives_a_device_by_number_alone_is_told_what_to_write(
    tmp_path: Path,
) -> None:
    script = tmp_path / "numbered.py"
    script.write_text("import torch\ntorch.device(0)\n")
    done = job([*ON_CPU["smdrun"], str(script)], cwd=tmp_path, OPENSMD_NATIVE="0")
    assert done.returncode == 1
    assert (
        'smdrun: there is no torch.accelerator here; for torch.device(0), write torch.device("cuda", 0)'
        in (done.stderr)
    )


def test_ranks_that_fail_alike_are_said_in_one_line(tmp_path: Path) -> None:
    done = job([str(BIN / "smdrun"), "-n", "3", str(SCRIPTS / "fails.py"), "all"], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: the batch is empty") == 2, done.stderr  # a traceback and a summary
    assert re.search(r"smdrun: ranks \d, \d failed in the same way\n", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("raise", 1, f"rank 1 failed first: ValueError: the batch is empty ({SCRIPTS / 'fails.py'}:"),
        ("exit", 7, "rank 1 failed first: exit code 7"),
        ("kill", 137, "rank 1 failed first: killed by SIGKILL"),
        ("terminate", 143, "rank 1 failed first: killed by SIGTERM"),
        ("leave", 1, "rank 1 ended first, with exit code 0, while others still needed it"),
    ],
)
def test_the_rank_that_failed_first_is_named_and_nothing_is_left(
    how: str, status: int, said: str, tmp_path: Path
) -> None:
    command = [*LAUNCHERS["smdrun"], str(SCRIPTS / "fails.py"), how]
    done = job(command, cwd=tmp_path, fork_ranks=how != "raise")
    assert done.returncode == status, done.stderr
    assert f"smdrun: {said}" in done.stderr
    wait_until_gone(tmp_path)
    if how == "raise":
        lines = done.stderr.splitlines()
        first = next(index for index, line in enumerate(lines) if "Traceback" in line)
        assert lines[first] == "[1] Traceback (most recent call last):"
        assert f'File "{SCRIPTS / "fails.py"}"' in lines[first + 1]
        assert "[1] ValueError: the batch is empty" in lines


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_a_signal_to_the_launcher_leaves_no_process_and_no_folder(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    command = [*LAUNCHERS["smdrun"], str(SCRIPTS / "fails.py"), "wait"]
    env = environment(TMPDIR=str(tmp_path))
    job = start_job(command, cwd=tmp_path, env=env, fork_ranks=number != signal.SIGINT)
    assert job.stdout is not None
    for _ in range(2):
        assert "started" in job.stdout.readline()
    assert list(tmp_path.glob("smdrun-*"))
    job.send_signal(number)
    _, err = job.communicate(timeout=PATIENCE)
    assert job.returncode == status, err
    if number != signal.SIGKILL:
        assert f"smdrun: ended by {number.name}" in err
        assert list(tmp_path.iterdir()) == []
    wait_until_gone(tmp_path)
    wait_until(lambda: not list(tmp_path.glob("smdrun-*")))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nnodes", "2", "x.py"], "--nnodes 2 needs --master-addr"),
        (["--channel", "training", "x.py"], "expected NAME=PATH"),
        (["--mp-parameters", "nonsense", "x.py"], "key=value"),
        (["-n", "0", "x.py"], "'0' is not a whole number of at least 1"),
        (["--nprocs", "2", "x.py"], "No such option"),
        (["--no-python", "--device", "cpu", "x.py"], "--no-python runs a program as it is"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").touch(0o755)
    done = job([str(BIN / "smdrun"), *arguments], cwd=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("smdrun -np 2 nope.py", "there is no script 'nope.py' in "),
        ("smdrun -n 2 -m nope.at.all", "there is no module 'nope' in "),
        ("smdrun .", "'.' is a folder without a __main__.py"),
        (
            "smdrun --nproc-per-node 2 train.sh",
            "'train.sh' is a script for /bin/sh, and ranks run Python: add",
        ),
        ("smdrun --no-python plain", "'plain' cannot be executed: run chmod +x plain"),
        ("smdrun --no-python nope", "there is no program 'nope'"),
        ("smdrun --log-dir plain/logs x.py", "--log-dir: cannot make the folder plain/logs: Not a directory"),
        ("ulimit -n 12; smdrun -n 1 x.py", "1 rank needs more open files than the 12"),
        ("ulimit -n 40; smdrun -n 8 x.py", "8 ranks need more open files than the 40"),
    ],
)
def test_what_cannot_start_is_said_in_one_line_before_anything_does(
    command: str, said: str, tmp_path: Path
) -> None:
    for name, text in (("x.py", ""), ("train.sh", "#!/bin/sh\nexec python train.py\n"), ("plain", "")):
        (tmp_path / name).write_text(text)
    done = run(
        ["sh", "-c", command.replace("smdrun", f"{sys.executable} -m opensmd.launch.cli")], cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"smdrun: {said}") and done.stderr.count("\n") == 1, done.stderr
    assert len(list(tmp_path.iterdir())) == 3


def test_a_program_runs_in_every_rank_and_a_file_a_rank_holds_what_it_says(tmp_path: Path) -> None:
    program = tmp_path / "train.sh"
    program.write_text(
        '#!/bin/sh\necho rank $RANK of $WORLD_SIZE: "$@"\necho aloud >&2\ntouch said.$RANK\n'
        "until [ -e said.0 ] && [ -e said.1 ]; do sleep 0.05; done\nexit $((RANK * 5))\n"
    )
    program.chmod(0o755)
    command = [str(BIN / "smdrun"), "-np", "2", "--log-dir", "logs", "--no-python", "train.sh", "-x", "a b"]
    done = job(command, cwd=tmp_path, fork_ranks=False)
    assert done.returncode == 5
    assert "smdrun: rank 1 failed first: exit code 5" in done.stderr
    for rank in range(2):
        assert f"[{rank}] rank {rank} of 2: -x a b\n" in done.stdout
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert sorted(log.splitlines()) == ["aloud", f"rank {rank} of 2: -x a b"]


def test_the_file_of_a_rank_ends_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("print('begun')\nraise ValueError('the batch is empty')\n")
    done = job([str(BIN / "smdrun"), "-n", "1", "--log-dir", "logs", "fails.py"], cwd=tmp_path)
    assert done.returncode == 1
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert log.startswith("begun\nTraceback") and log.endswith("ValueError: the batch is empty\n")


@pytest.mark.parametrize("option", ["--log-dir", "--timeline"])
def test_a_second_job_in_the_folder_of_a_running_one_starts_nothing(tmp_path: Path, option: str) -> None:
    (tmp_path / "waits.py").write_text(f"import time\nprint('up', flush=True)\ntime.sleep({PATIENCE})\n")
    (tmp_path / "hello.py").write_text("print('hello')\n")
    smdrun = [str(BIN / "smdrun"), "-n", "1", option, "shared"]
    first = start_job([*smdrun, "waits.py"], cwd=tmp_path, env=environment())
    assert first.stdout is not None
    assert first.stdout.readline() == "[0] up\n"
    second = job([*smdrun, "hello.py"], cwd=tmp_path)
    first.send_signal(signal.SIGTERM)
    first.wait(timeout=PATIENCE)
    assert (second.returncode, second.stdout) == (2, "")
    assert f"smdrun: {option} shared: another job (process {first.pid}) writes there" in second.stderr
    assert job([*smdrun, "hello.py"], cwd=tmp_path).returncode == 0
    assert [path.name for path in (tmp_path / "shared").iterdir() if path.suffix == ".lock"] == []


SAYS_MUCH = """
import pathlib
for number in range(3000):
    print("line", number, "-" * 80, flush=True)
pathlib.Path("done").touch()
"""


def test_a_job_whose_reader_leaves_ends_like_any_program_in_a_pipe(tmp_path: Path) -> None:
    script = tmp_path / "says_for_ever.py"
    script.write_text("while True:\n    print('-' * 80, flush=True)\n")
    command = [str(BIN / "smdrun"), "-n", "1", str(script)]
    job = start_job(command, cwd=tmp_path, env=environment())
    assert job.stdout is not None and job.stderr is not None
    job.stdout.readline()
    job.stdout.close()
    said = job.stderr.read()
    assert job.wait(timeout=PATIENCE) == 128 + signal.SIGPIPE
    assert said == "smdrun: ended by SIGPIPE: nobody reads its output any more\n"


@pytest.mark.parametrize("streams", [">/dev/full", ">&- <&-", ">&- 2>&- <&-"])
def test_a_job_whose_output_has_no_place_to_go_goes_on(streams: str, tmp_path: Path) -> None:
    (tmp_path / "says_much.py").write_text(SAYS_MUCH)
    done = run(["sh", "-c", f'exec "{BIN}/smdrun" -n 1 says_much.py {streams}'], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists()
    lost = "smdrun: the job goes on without its output, which cannot be written: No space left on device\n"
    assert done.stderr == (lost if "full" in streams else "")


def test_what_ranks_write_in_another_encoding_comes_out_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_text("import sys\nsys.stdout.buffer.write(b'caf\\xe9 \\xc3\\xa9\\n')\n")
    done = subprocess.run(
        [str(BIN / "smdrun"), "-n", "1", "latin.py"],
        cwd=tmp_path,
        env=environment(PYTHONIOENCODING="ascii"),
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"[0] caf\xe9 \xc3\xa9\n"), done.stderr


def test_a_job_under_nohup_outlives_its_session(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("print('started', flush=True)\ninput()\nprint('went on', flush=True)\n")
    job = subprocess.Popen(
        ["nohup", str(BIN / "smdrun"), "-n", "1", str(script)],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert job.stdout is not None and job.stdout.readline() == "[0] started\n"
    os.killpg(job.pid, signal.SIGHUP)
    out, err = job.communicate("\n", timeout=PATIENCE)
    assert (job.returncode, out) == (0, "[0] went on\n"), err


def test_a_folder_for_results_that_cannot_be_made_is_told_and_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "says.py").write_text("print('here')\n")
    done = job([str(BIN / "smdrun"), "-n", "1", "--output", "taken/out", "says.py"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[0] here\n"), done.stderr
    assert "cannot make the folder" in done.stderr and "--output" in done.stderr


def test_a_wrong_variable_of_the_backend_is_explained_like_a_wrong_option(tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    done = run([str(BIN / "smdrun"), "-n", "1", "x.py"], cwd=tmp_path, OPENSMD_HEAP_BYTES="1k")
    assert done.returncode == 2
    assert "Error: OPENSMD_HEAP_BYTES='1k': expected a number of bytes" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_first_build_ends_it(number: signal.Signals, tmp_path: Path) -> None:
    compiler, calls = tmp_path / "slow-cxx", tmp_path / "calls"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho call >> "{calls}"\nexec sleep 1000\n'
    )
    compiler.chmod(0o755)
    env = environment(CXX=str(compiler), OPENSMD_CACHE_DIR=str(tmp_path / "cache"))
    (tmp_path / "x.py").touch()
    command = [str(BIN / "smdrun"), "-n", "1", "x.py"]
    job = start_job(command, cwd=tmp_path, env=env)
    deadline = time.monotonic() + PATIENCE
    while not calls.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(number)
    _, err = job.communicate(timeout=PATIENCE)
    assert job.returncode == 128 + number
    assert err.splitlines()[-1] == f"smdrun: ended by {number.name}" and "Traceback" not in err
    assert calls.read_text().count("call") <= len(os.sched_getaffinity(0)), "files are still compiled"
    assert [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("building-")] == []

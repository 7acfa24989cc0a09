"""smdrun where its surroundings lack something, waits for other hosts, or ranks leave something behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from opensmd.collectives.stores.listening import why_no_connection
from tests.scripts.test_smddp_scripts import BIN, environment, run
from tests.support.forked_jobs import run_job, start_job
from tests.support.forks import ForkedProcess
from tests.support.patience import PATIENCE, wait_until
from tests.support.ports import free_port

SMDRUN = f"{BIN}/smdrun"
HELLO = "import os\nprint('hello', os.environ['RANK'])\n"


def run_apart(namespaces: str, line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of the shell in new namespaces of these kinds, as ``unshare`` names them."""
    if subprocess.run(["unshare", namespaces, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make namespaces")
    return run(["unshare", namespaces, "sh", "-c", line], cwd=folder)


@pytest.mark.parametrize(
    ("namespaces", "line", "said"),
    [
        ("-n", "{smdrun} -n 2 hello.py", "ranks of one host meet at 127.0.0.1, which cannot be reached here"),
        ("-m", "umount -l /proc; {smdrun} -n 2 hello.py", "/proc is missing here"),
        (
            "-m",
            # what is there can still be read, perhaps this checkout
            "for f in /tmp /var/tmp /usr/tmp; do [ ! -d $f ] || mount --rbind -o ro $f $f; done; "
            "unset TMPDIR TEMP TMP; cd /proc; {smdrun} -n 1 -m json.tool",
            "cannot make a temporary folder: No usable temporary directory found",
        ),
        (
            "-m",
            "mkdir gone; cd gone; rmdir ../gone; {smdrun} -n 2 hello.py",
            "the current folder has been removed",
        ),
    ],
    ids=["no loopback", "no /proc", "no temporary folder", "no current folder"],
)
def test_what_is_missing_is_said_in_one_line_before_anything_starts(
    namespaces: str, line: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    done = run_apart(namespaces, line.format(smdrun=SMDRUN), tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"smdrun: {said}") and done.stderr.count("\n") == 1, done.stderr


def test_a_process_started_by_hand_is_told_that_the_loopback_is_down(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "import smdistributed.dataparallel.torch.torch_smddp\n"
        "dist.init_process_group('smddp')\n"
    )
    done = run_apart("-n", f"{BIN}/python {script}", tmp_path)
    assert done.returncode == 1
    assert "DistNetworkError: ranks of one host meet at 127.0.0.1" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("namespaces", "before"),
    [
        ("-m", "mount -t tmpfs none /dev; mknod /dev/null c 1 3; mknod /dev/urandom c 1 9"),
        ("-u", f"hostname {'x' * 64}"),
    ],
    ids=["no /dev/fd", "a host name that is too long for DNS"],
)
def test_what_a_sandbox_may_lack_is_done_without(namespaces: str, before: str, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    done = run_apart(namespaces, f"{before} && {SMDRUN} -n 2 hello.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] hello 0", "[1] hello 1"]


def test_ranks_that_cannot_be_started_are_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    full = tmp_path / "full"
    full.mkdir()
    line = f"mount -t tmpfs -o nr_inodes=5 none {full} && TMPDIR={full} {SMDRUN} -n 2 hello.py"
    done = run_apart("-m", line, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    said = "smdrun: the ranks cannot be started: [Errno 28] No space left on device"
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1, done.stderr


def test_what_is_hardly_meant_is_remarked_upon(tmp_path: Path) -> None:
    one = min(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(one), "env", "OPENSMD_NATVE=0", SMDRUN, "-n", "9", "--no-python", "true"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 0
    misspelt, crowded = done.stderr.splitlines()[:2]
    assert misspelt == "smdrun: OPENSMD_NATVE has no effect; did you mean OPENSMD_NATIVE?"
    assert crowded.startswith("smdrun: 9 ranks take turns on 1 core"), done.stderr


def test_a_safe_path_keeps_its_first_place(tmp_path: Path) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "of_the_user.py").write_text("")
    (tmp_path / "script.py").write_text("import sys, of_the_user\nprint(sys.path[0])\n")
    env = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(libraries)}
    done = run([SMDRUN, "-n", "1", "script.py"], cwd=tmp_path, **env)
    assert (done.returncode, done.stdout) == (0, f"[0] {libraries}\n"), done.stderr


def test_names_and_arguments_that_begin_like_options_reach_the_script(tmp_path: Path) -> None:
    (tmp_path / "-script.py").write_text("import sys\nprint(sys.argv)")
    done = run_job(["smdrun", "-n", "1", "--", "-script.py", "--", "-n"], cwd=tmp_path, env=environment())
    assert done.stdout == "[0] ['-script.py', '--', '-n']\n", done.stderr


def smdrun(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A job of one rank with this script."""
    (folder / "script.py").write_text(script)
    return run_job([SMDRUN, "-n", "1", "script.py"], cwd=folder, env=environment())


def test_an_error_whose_text_cannot_be_encoded_is_shown_as_python_does(tmp_path: Path) -> None:
    done = smdrun("raise ValueError('half of \\ud83d')\n", tmp_path)
    assert done.returncode == 1
    assert "\n[0] ValueError: half of \\ud83d\nsmdrun: rank 0 failed first" in done.stderr, done.stderr


FAILS_IN_A_CHILD = """
import os
for end in ("raise ValueError('of the child')", "raise SystemExit(3)"):
    if (child := os.fork()) == 0:
        exec(end)
    os.waitpid(child, 0)
os.kill(os.getpid(), 9)
"""


def test_a_rank_ignores_what_every_interpreter_ignores(tmp_path: Path) -> None:
    """Also here, where ranks are forks: SIGPIPE would kill one that wrote to a host that had ended."""
    (tmp_path / "script.py").write_text("print(open('/proc/self/status').read())")
    done = run_job(["smdrun", "-n", "1", "script.py"], cwd=tmp_path, env=environment())
    ignored = int(done.stdout.split("SigIgn:")[1].split()[0], base=16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert ignored >> (number - 1) & 1


def test_what_a_child_of_a_rank_fails_of_is_not_taken_for_the_failure_of_the_rank(tmp_path: Path) -> None:
    done = smdrun(FAILS_IN_A_CHILD, tmp_path)
    assert done.returncode == 137
    assert done.stderr.count("ValueError: of the child") == 1, done.stderr
    assert "smdrun: rank 0 failed first: killed by SIGKILL" in done.stderr


def test_a_job_ends_though_what_a_rank_has_left_behind_writes_for_ever(tmp_path: Path) -> None:
    done = smdrun("import subprocess\nsubprocess.Popen(['yes'])\n", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


LEAVES_ORPHANS = f"""
import os, time, psutil
for _ in range(20):
    os.system("true &")
end = time.monotonic() + {PATIENCE}
while len(psutil.Process(os.getppid()).children()) > 2 and time.monotonic() < end:
    time.sleep(0.1)
print(len(psutil.Process(os.getppid()).children()))
"""


def test_orphans_of_ranks_that_end_leave_no_zombies_while_the_job_goes_on(tmp_path: Path) -> None:
    assert smdrun(LEAVES_ORPHANS, tmp_path).stdout == "[0] 2\n"  # the rank and the guardian


def test_a_line_longer_than_anybody_reads_comes_out_as_it_is(tmp_path: Path) -> None:
    done = smdrun("print('x' * 3_000_000)\nprint('short')\n", tmp_path)
    assert done.stdout == f"[0] {'x' * 3_000_000}\n[0] short\n"


def host(number: int, port: int, folder: Path) -> ForkedProcess:
    """One of two hosts of a job, whose store is at this port."""
    place = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port"]
    (folder / "hello.py").write_text(HELLO)
    return start_job([SMDRUN, "-n", "1", *place, str(port), "hello.py"], cwd=folder, env=environment())


def test_a_host_that_waits_for_host_0_says_so_and_hears_signals(tmp_path: Path) -> None:
    port = free_port()
    job = host(1, port, tmp_path)
    assert job.stderr is not None
    assert f"smdrun: waits for the smdrun of host 0 at 127.0.0.1:{port}" in job.stderr.readline()
    job.send_signal(signal.SIGINT)
    assert job.communicate(PATIENCE)[1] == "smdrun: ended by SIGINT\n"
    assert job.wait(PATIENCE) == 130


def test_host_0_hears_signals_while_it_waits_for_the_others(tmp_path: Path) -> None:
    port = free_port()
    job = host(0, port, tmp_path)
    wait_until(lambda: why_no_connection("127.0.0.1", port) is None)
    job.send_signal(signal.SIGTERM)
    assert job.communicate(PATIENCE)[1] == "smdrun: ended by SIGTERM\n"
    assert job.wait(PATIENCE) == 143


def test_a_port_that_is_taken_is_named_with_the_option_that_chooses_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = host(0, port, tmp_path)
        told = job.communicate(PATIENCE)[1]
    assert job.wait(PATIENCE) == 1
    assert f"this host cannot serve their store at 127.0.0.1:{port}: Address already in use" in told
    assert "--master-port" in told and told.count("\n") == 1, told

"""One smdrun for several hosts: however it ends, nothing of the job stays on any of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.scripts.test_smddp_scripts import BIN, environment, run
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import ROOT

MARK = "OPENSMD_MARK_OF_A_TEST"
HOSTS = ("127.0.0.1", "127.0.0.2")
SSH = f"{sys.executable} -S {ROOT / 'tests' / 'support' / 'ssh.py'}"
WAITS = "#!/bin/sh\nsleep 1000 &\necho ready\nwait\n"


def on_hosts(*arguments: str, ranks: int = 1) -> list[str]:
    """A command that runs on both hosts."""
    hosts = ",".join(f"{host}:{ranks}" for host in HOSTS)
    place = ["--hosts", hosts, "--ssh", SSH, "--master-port", str(free_port())]
    return [str(BIN / "smdrun"), *place, *arguments]


def of_job(mark: str) -> list[psutil.Process]:
    """The living processes of a job but the command itself, which has no such variable in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def waiting_job(folder: Path, mark: str) -> Iterator[subprocess.Popen[str]]:
    """A job whose ranks and what they have started wait for ever, when both have said that they do."""
    (folder / "waits.sh").write_text(WAITS)
    (folder / "waits.sh").chmod(0o755)
    job = subprocess.Popen(
        on_hosts("--no-python", "waits.sh"),
        cwd=folder,
        env=environment(**{MARK: mark}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout is not None
        said = sorted(job.stdout.readline() for _ in HOSTS)
        assert said == ["[0] ready\n", "[1] ready\n"], job.communicate()
        yield job
    finally:
        job.kill()
        job.wait()


@pytest.mark.parametrize("how", ["Ctrl-C", "a connection is lost", "the command is killed"])
def test_nothing_of_a_job_stays_on_its_hosts(how: str, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with waiting_job(tmp_path, mark) as job:
        if how == "a connection is lost":
            (lost,) = (child for child in psutil.Process(job.pid).children() if HOSTS[1] in child.cmdline())
            lost.kill()
        else:
            job.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGKILL)
        _, err = job.communicate(timeout=PATIENCE)
        deadline = time.monotonic() + PATIENCE / 2
        while left := [process for process in of_job(mark) if process.pid != job.pid]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    if how == "Ctrl-C":
        assert (job.returncode, err.splitlines()[-1]) == (130, "smdrun: ended by SIGINT")
    elif how == "a connection is lost":
        assert job.returncode == 128 + signal.SIGKILL
        assert f"smdrun: {HOSTS[1]} failed first; all hosts have ended" in err
        assert f"smdrun on {HOSTS[0]}: " in err


def test_a_host_that_cannot_be_reached_ends_the_job_and_is_named(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\n[ "$1" = {HOSTS[1]} ] && {{ echo no route to $1 >&2; exit 255; }}\nexec {SSH} "$@"\n'
    )
    ssh.chmod(0o755)
    (tmp_path / "train.py").touch()
    done = run([*on_hosts(), "--ssh", str(ssh), "train.py"], cwd=tmp_path)
    assert done.returncode == 255
    assert "no route to 127.0.0.2\n" in done.stderr
    assert f"smdrun: the connection to {HOSTS[1]} failed or was lost: see what ssh says above" in done.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--hosts", "a:x"], "'a:x' is no host with a number of ranks"),
        (["--hosts", "a", "--hostfile", os.devnull], "--hosts and --hostfile both say where to run"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    options: list[str], why: str, tmp_path: Path
) -> None:
    done = run([str(BIN / "smdrun"), *options, "train.py"], cwd=tmp_path)
    assert done.returncode == 2
    assert why in done.stderr

"""Another user of the machine attacks a job that runs: he reaches no listener, file, process or key of it."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - the intruder cannot read the interpreter's files
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user of the machine")

# Between waiting and reading, its ranks let the intruder write over every key.
JOB = """
import os, sys, time, torch
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
from opensmd.collectives import exchange

dist.init_process_group("smddp", timeout=timedelta(seconds=240))
gloo = dist.new_group(backend="gloo")
dist.all_reduce(torch.ones(1), group=gloo)
wait = exchange.Exchange._wait
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
def wait_for_intruder(self, topic, keys):
    wait(self, topic, keys)
    begun = store.add("rounds", 0)
    while store.add("rounds", 0) < begun + 2:  # the first of which may have begun before the keys were there
        time.sleep(0.01)
exchange.Exchange._wait = wait_for_intruder
print("ready", os.environ["MASTER_PORT"], flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
try:
    group = dist.new_group(timeout=timedelta(seconds=240))
    dist.all_reduce(torch.ones(1), group=group)
    print("accepted", flush=True)
except dist.DistBackendError as error:
    print("refused", str(error).replace(chr(10), " "), flush=True)
time.sleep(600)
"""


class Job:
    """A job of smdrun, its processes, and what it says."""

    def __init__(self, folder: Path) -> None:
        (folder / "job.py").write_text(JOB)
        self.go = folder / "go"
        command = [
            sys.executable,
            "-m",
            "opensmd.launch.cli",
            "--no-prefix",
            "-n",
            "2",
            "job.py",
            str(self.go),
        ]
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": pythonpath()},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self.lines(2)[0].split()[1])

    def lines(self, count: int) -> list[str]:
        assert self._process.stdout is not None
        return [self._process.stdout.readline().strip() for _ in range(count)]

    @property
    def processes(self) -> list[psutil.Process]:
        launcher = psutil.Process(self._process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(PATIENCE)


def pythonpath() -> str:
    return os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    running = Job(tmp_path_factory.mktemp("job"))
    yield running
    running.end()


def as_another_user(action: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process of a user without rights."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            answer = pickle.dumps(action(*args))
        except BaseException as error:
            answer = pickle.dumps(error)
        os.write(write, answer)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    result = pickle.loads(answer)
    if isinstance(result, BaseException):
        raise result
    return result


def addresses() -> set[str]:
    """All addresses of this machine but the loopback."""
    found = {
        one.address for of_one in psutil.net_if_addrs().values() for one in of_one if ":" not in one.address
    }
    return {address for address in found if not address.startswith("127.") and address.count(".") == 3}


def reach(ports: set[int]) -> list[tuple[str, int]]:
    reached = []
    for address in addresses():
        for port in ports:
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
                reached.append((address, port))
    return reached


def test_no_port_of_the_job_answers_beyond_the_loopback(job: Job) -> None:
    listening = {
        connection.laddr
        for process in job.processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    }
    assert len(listening) >= 3  # the store, and a rank's Gloo each
    assert {where.ip for where in listening} <= {"127.0.0.1", "::1"}
    assert as_another_user(reach, {where.port for where in listening}) == []


def touch(paths: list[str], pids: list[int]) -> list[str]:
    """What of the job's files and processes this process can read, write, list or end."""
    done = []
    for path in paths:
        for flags in (os.O_RDONLY, os.O_WRONLY):
            with contextlib.suppress(OSError):
                os.close(os.open(path, flags))
                done.append(f"opened {path}")
    for pid in pids:
        for attempt in (
            lambda pid=pid: os.kill(pid, signal.SIGTERM),
            lambda pid=pid: list(Path(f"/proc/{pid}/fd").iterdir()),
            lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes(),
            lambda pid=pid: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)),
        ):
            with contextlib.suppress(OSError):
                attempt()
                done.append(f"reached process {pid}")
    return done


def is_roots(path: Path) -> bool:
    """Whether root's, and still there: those of other jobs come and go."""
    with contextlib.suppress(FileNotFoundError):
        return path.owner() == "root"
    return False


def test_no_file_and_no_process_of_the_job_can_be_touched(job: Job) -> None:
    files = {open_file.path for process in job.processes for open_file in process.open_files()}
    maps = {one.path for process in job.processes for one in process.memory_maps() if "opensmd" in one.path}
    folders = {str(path) for path in Path(gettempdir()).glob("smdrun-*") if is_roots(path)}
    descriptors = {
        str(path) for process in job.processes for path in Path(f"/proc/{process.pid}/fd").iterdir()
    }
    assert maps and folders and descriptors
    places = ("/dev/shm", gettempdir(), str(Path.home() / ".cache"))
    private = {path for path in files | maps if path.startswith(places)}
    assert (
        as_another_user(touch, sorted(private | folders | descriptors), [one.pid for one in job.processes])
        == []
    )


class Malicious:
    """A pickle that leaves a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def forge(port: int, marker: Path, done: Path) -> int:
    """Overwrite every key in the job's store again and again until ``done`` is there; how many there were."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE))
    identity = json.dumps({"host": "another", "pid": 1, "hostname": "another"})  # as a rank's own would be
    payload = pickle.dumps(Malicious(marker))
    forged = set()
    while not done.exists():
        for key in store.list_keys():
            if "identity" in key or "arena" in key or "attached" in key:
                store.set(key, identity if "identity" in key else payload)  # type: ignore[arg-type]
                forged.add(key)
        store.add("rounds", 1)
    return len(forged)


def test_a_key_that_another_user_wrote_is_not_believed(job: Job, tmp_path: Path) -> None:
    marker = Path("/tmp") / f"marker-{os.getpid()}"
    done = marker.with_name(f"done-{os.getpid()}")
    said: list[str] = []

    def listen() -> None:
        job.go.touch()
        said.extend(job.lines(2))
        done.touch()

    listening = threading.Thread(target=listen)
    listening.start()
    try:
        assert as_another_user(forge, job.port, marker, done) > 0
    finally:
        listening.join()
        done.unlink()
    for line in said:
        assert line.startswith("refused") and "bears no code of this job's secret" in line
    assert not marker.exists()

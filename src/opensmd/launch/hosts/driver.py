"""Running smdrun on several hosts: start all, show their output, and end all when one fails.

Every host's smdrun runs the same job under its own number. Its output arrives in whole lines that already
have the rank in front.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO, TextIO

from opensmd.environment import job_secret
from opensmd.launch import signals
from opensmd.launch.hosts.host_list import Host
from opensmd.launch.hosts.order import Order, command_line, forwarded
from opensmd.launch.hosts.recorded import fetch, folder_on_host, line_for
from opensmd.launch.output import streams
from opensmd.launch.output.explanation import FAILED_ELSEWHERE

__all__ = ["SSH", "HostsJob", "run_on_hosts"]

SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=15"
AFTER_A_FAILURE = 15.0  # seconds for the other hosts to end by themselves and say why
SHUTDOWN = 20.0  # seconds for a host to end its ranks
_SSH_FAILED = 255
_OWN_LINE = b"smdrun: "


@dataclass(frozen=True)
class HostsJob:
    """A job for several hosts.

    Attributes:
        hosts: all of them; host 0 comes first.
        options: of each host's smdrun, without its position.
        script: the script with its arguments.
        master_addr: of host 0, as the others know it.
        master_port: on host 0.
        ssh: the command that reaches a host; the host's name and a shell command are appended.
        timeline: an existing folder on this host for what the ranks of all hosts record.
    """

    hosts: Sequence[Host]
    options: Sequence[str]
    script: Sequence[str]
    master_addr: str
    master_port: int
    ssh: str = SSH
    timeline: Path | None = None


@dataclass(eq=False)
class _Connection:
    host: Host
    process: subprocess.Popen[bytes]
    readers: list[threading.Thread] = field(default_factory=list)
    failed_after_another: bool = False
    ended: float | None = None

    def hang_up(self) -> None:
        """End the job on this host: its smdrun ends with its input."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class _Output:
    """The standard streams of this process, shared by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reader_left = False

    def put(self, out: TextIO, line: bytes) -> None:
        with self._lock:
            error = streams.put(out, line.decode(errors="surrogateescape"))
            self.reader_left |= isinstance(error, BrokenPipeError)

    def say(self, text: str) -> None:
        self.put(sys.stderr, f"smdrun: {text}\n".encode())


def run_on_hosts(job: HostsJob) -> int:
    """Run a job; return 0, the exit status of the host that failed first, or 128 + a signal."""
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)

    signals.listen(stop)
    output = _Output()
    connections: list[_Connection] = []
    try:
        variables = _variables()
        for number in range(len(job.hosts)):
            connections.append(_connect(job, number, variables, output))
        _wait(connections, received, output)
    except OSError as error:
        output.say(f"cannot start {shlex.split(job.ssh)[0]!r}: {error.strerror}")
        return 2
    finally:
        _end(connections)
    if job.timeline is not None:
        _fetch_timeline(job, job.timeline, output)
    if output.reader_left:
        return 128 + signal.SIGPIPE
    if received:
        output.say(f"ended by {signal.Signals(received[0]).name}")
        return 128 + received[0]
    return _status(connections, output)


def _variables() -> dict[str, str]:
    """Return variables for all hosts; the job gets a secret in any case."""
    secret = job_secret.given(os.environ) or secrets.token_hex(32)
    return {**forwarded(os.environ), job_secret.VARIABLE: secret}


def _connect(job: HostsJob, number: int, variables: dict[str, str], output: _Output) -> _Connection:
    host = job.hosts[number]
    place = ["--nnodes", str(len(job.hosts)), "--node-rank", str(number), "--master-addr", job.master_addr]
    place += ["--master-port", str(job.master_port)]
    ranks = [] if host.ranks is None else ["-n", str(host.ranks)]
    records = [] if job.timeline is None else ["--records", str(folder_on_host(job.timeline, number))]
    folder = _working_folder()
    order = Order(folder, variables, [*job.options, *records, *ranks, *place, "--", *job.script])
    process = subprocess.Popen(
        [*shlex.split(job.ssh), host.target, command_line(sys.executable, folder, os.environ)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is only for this process
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    connection = _Connection(host, process)
    for source, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        reader = threading.Thread(target=_forward, args=(connection, source, out, output), daemon=True)
        reader.start()
        connection.readers.append(reader)
    with contextlib.suppress(BrokenPipeError):  # the exit status will tell
        process.stdin.write(order.to_line())
        process.stdin.flush()
    return connection


def _forward(connection: _Connection, source: BinaryIO, out: TextIO, output: _Output) -> None:
    """Show whole lines, prefixed with the host's name if they come from its smdrun."""
    for line in source:
        whole = line if line.endswith(b"\n") else line + b"\n"
        if whole.startswith(_OWN_LINE):
            connection.failed_after_another |= FAILED_ELSEWHERE.encode() in whole
            whole = b"smdrun on %s: " % connection.host.target.encode() + whole[len(_OWN_LINE) :]
        output.put(out, whole)


def _wait(connections: Sequence[_Connection], received: Sequence[int], output: _Output) -> None:
    """Wait until all have ended, a signal comes, the reader leaves, or the time after a failure is up."""
    while not received and not output.reader_left:
        now = time.monotonic()
        for connection in connections:
            if connection.ended is None and connection.process.poll() is not None:
                connection.ended = now
        ended = [connection for connection in connections if connection.ended is not None]
        failed = [one.ended for one in ended if one.process.returncode and one.ended is not None]
        if any(one.process.returncode == _SSH_FAILED for one in ended):
            return  # the others would only wait for a host that never came
        if len(ended) == len(connections) or (failed and now - min(failed) > AFTER_A_FAILURE):
            return
        time.sleep(0.05)


def _end(connections: Sequence[_Connection]) -> None:
    """Hang up, give all hosts time to end their ranks, and show their remaining output."""
    for connection in connections:
        connection.hang_up()
    deadline = time.monotonic() + SHUTDOWN
    for connection in connections:
        try:
            connection.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            connection.process.kill()
            connection.process.wait()
        for reader in connection.readers:
            reader.join(1.0)  # leftovers on a host may hold the other end


def _working_folder() -> str:
    return os.getcwd()  # noqa: PTH109 - a text for another machine


def _fetch_timeline(job: HostsJob, folder: Path, output: _Output) -> None:
    """Collect what all hosts have recorded in ``folder``; report hosts whose part is missing."""
    for number, host in enumerate(job.hosts):
        line = line_for(folder_on_host(folder, number), _working_folder(), os.environ)
        why = fetch([*shlex.split(job.ssh), host.target], line, folder)
        if why is not None:
            output.say(f"the timeline lacks the ranks on {host.target}: {why}")


def _status(connections: Sequence[_Connection], output: _Output) -> int:
    failed = [connection for connection in connections if connection.process.returncode]
    if not failed:
        return 0

    def order(connection: _Connection) -> tuple[bool, float]:
        when = float("inf") if connection.ended is None else connection.ended
        return connection.failed_after_another, when

    first = min(failed, key=order)
    code = first.process.returncode
    if code == _SSH_FAILED:
        output.say(f"the connection to {first.host.target} failed or was lost: see what ssh says above")
    else:
        output.say(f"{first.host.target} failed first; all hosts have ended")
    return code if code > 0 else 128 - code

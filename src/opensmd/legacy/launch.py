"""``python -m torch.distributed.deprecated.launch``: one process per device, on one or several hosts.

Each process gets MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK, and ``--local_rank=N`` as its
first argument. The first process that fails ends the others, and its exit code is the launcher's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

__all__ = ["main"]

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Start this host's processes and wait for them.

    Args:
        arguments: the command line; by default ``sys.argv[1:]``.

    Returns:
        The exit code: 0, or that of the first process that failed (128 + the signal's number for a killed
        one).
    """
    options = _parser().parse_args(arguments)
    if options.no_python and (options.module or not options.use_env):
        _parser().error(
            "--no_python needs --use_env and excludes --module: only Python scripts take --local_rank"
        )
    request = _Asked()  # before the first process, which would outlive a launcher killed by a signal
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for local_rank in range(options.nproc_per_node):
            environment = environment_of(options, local_rank, os.environ)
            processes.append(subprocess.Popen(command_of(options, local_rank), env=environment))
        return _wait(processes, options, request)
    finally:
        _end(processes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch.distributed.deprecated.launch",
        description="Start a script of torch.distributed.deprecated in several processes on this host.",
    )
    parser.add_argument("--nnodes", type=int, default=1, help="number of hosts (default 1)")
    parser.add_argument("--node_rank", type=int, default=0, help="number of this host, from 0")
    parser.add_argument("--nproc_per_node", type=int, default=1, help="processes on each host (default 1)")
    parser.add_argument("--master_addr", default="127.0.0.1", help="address of host 0")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port of host 0")
    parser.add_argument("--use_env", action="store_true", help="do not pass --local_rank; LOCAL_RANK has it")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    parser.add_argument("--no_python", action="store_true", help="the script is a program; needs --use_env")
    parser.add_argument("script", help="the training script, followed by its own arguments")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER)
    return parser


def command_of(options: argparse.Namespace, local_rank: int) -> list[str]:
    """Return the command line of one process."""
    command = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
    passed = [] if options.use_env else [f"--local_rank={local_rank}"]
    return [*command, options.script, *passed, *options.script_arguments]


def environment_of(
    options: argparse.Namespace, local_rank: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of one process."""
    own = {
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
        "WORLD_SIZE": str(options.nnodes * options.nproc_per_node),
        "RANK": str(options.node_rank * options.nproc_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(options.nproc_per_node),
    }
    if options.nproc_per_node > 1:
        # as in torch's launcher: a full thread pool per process would overload the host
        own["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS", "1")
    return {**environment, **own}


def _wait(processes: list[subprocess.Popen[bytes]], options: argparse.Namespace, request: _Asked) -> int:
    """Wait until all have succeeded, one has failed, or the launcher is asked to end."""
    while True:
        if request.by_signal is not None:
            return 128 + request.by_signal
        codes = [process.poll() for process in processes]
        for local_rank, code in enumerate(codes):
            if code:
                how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
                print(
                    f"launch: the process of local rank {local_rank} ({options.script}) {how}",
                    file=sys.stderr,
                )
                return 128 - code if code < 0 else code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_SECONDS)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End those still running: first ask, then kill."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Asked:
    """Whether this process has been asked to end, from now on.

    A raising handler could interrupt between the start of a process and its registration.
    """

    def __init__(self) -> None:
        self.by_signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.by_signal = number


if __name__ == "__main__":
    sys.exit(main())

"""Real processes for tests: a persistent pool of ranks for each world size, and throw-away ranks for faults.

A pool's processes are started once a session, because importing torch costs seconds. A call of
:meth:`RankPool.run` runs one importable function on every rank and returns what each rank returned. A rank
that fails or does not answer in time costs the pool its processes: the next call starts new ones, so that no
test inherits the wreck of another.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from opensmd.launch.torch_import import without_collector
from tests.support.forks import ForkedProcess
from tests.support.patience import PATIENCE
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
THREADS = {"OMP_NUM_THREADS": "1"}
# In the pool of this size, which most tests use, the last rank is an interpreter of its own, with its own
# order of sets. All others are forks: interpreters take seconds to start, for each of pytest's workers.
WITH_INTERPRETER = 2


class RankFailed(AssertionError):
    """One or more ranks raised or died; the message holds every such rank's traceback."""

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


class Outcome:
    """What one rank did with one call: a value, an exception, a death, or nothing in time."""

    def __init__(self, kind: str, value: Any = None, text: str = "", seconds: float = 0.0) -> None:
        self.kind = kind  # "value", "error", "died" or "timeout"
        self.value = value  # the value, the exception, the exit code, or None
        self.text = text  # traceback or stack dump
        self.seconds = seconds  # from the call to the answer, as the rank measured it

    def __repr__(self) -> str:
        return f"Outcome({self.kind}, {self.value!r})"


class Ranks:
    """``world_size`` processes that wait for functions to run; the first ``forked`` of them are forks."""

    def __init__(self, world_size: int, *, env: Mapping[str, str] | None = None, forked: int = 0) -> None:
        self.world_size = world_size
        self._dir = tempfile.TemporaryDirectory(prefix="ranks-")
        self._processes: list[subprocess.Popen[bytes] | ForkedProcess] = []
        self._links: list[Connection] = []
        address = str(Path(self._dir.name) / "link")
        key = os.urandom(16)
        with Listener(address, family="AF_UNIX", authkey=key) as listener:
            for rank in range(world_size):
                start = self._fork if rank < forked else self._start
                self._processes.append(start(rank, address, key, env or {}))
            links = [listener.accept() for _ in range(world_size)]
        by_rank = {link.recv(): link for link in links}
        self._links = [by_rank[rank] for rank in range(world_size)]

    def _fork(self, rank: int, address: str, key: bytes, env: Mapping[str, str]) -> ForkedProcess:
        place = (rank, self.world_size, address, key)
        stderr = Path(self._dir.name) / f"stderr-{rank}"
        return ForkedProcess(_serve, *place, cwd=ROOT, env={**os.environ, **THREADS, **env}, stderr=stderr)

    def _start(self, rank: int, address: str, key: bytes, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        stderr = (Path(self._dir.name) / f"stderr-{rank}").open("wb")
        full = {**os.environ, **THREADS, "PYTHONUNBUFFERED": "1", **env}
        command = [
            sys.executable,
            "-m",
            "tests.support.ranks",
            str(rank),
            str(self.world_size),
            address,
            key.hex(),
        ]
        with stderr:
            return subprocess.Popen(command, cwd=ROOT, env=full, stderr=stderr)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def call(
        self,
        function: Callable[..., Any],
        per_rank_args: Sequence[tuple[Any, ...]],
        *,
        backend: str | None,
        timeout: float,
        group_timeout: float,
    ) -> None:
        """Start ``function`` on every rank without waiting for the answers."""
        port = free_port()
        for link, args in zip(self._links, per_rank_args, strict=True):
            link.send_bytes(pickle.dumps((function, args, backend, port, group_timeout)))
        self._deadline = time.monotonic() + timeout

    def answers(self, *, silent: Collection[int] = ()) -> list[Outcome]:
        """Wait for every rank's answer of the last :meth:`call`, until its deadline.

        For those that are to be ``silent`` nobody waits once all others have answered.
        """
        outcomes: dict[int, Outcome] = {}
        while set(range(self.world_size)) - set(outcomes) - set(silent):
            open_links = {self._links[r]: r for r in range(self.world_size) if r not in outcomes}
            ready = wait(list(open_links), timeout=max(0.0, self._deadline - time.monotonic()))
            if not ready:
                break
            for link in ready:
                rank = open_links[link]  # type: ignore[index]
                outcomes[rank] = self._receive(rank)
        for rank in set(range(self.world_size)) - set(outcomes):
            outcomes[rank] = Outcome("timeout", None, self._stacks(rank))
        return [outcomes[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int) -> Outcome:
        try:
            kind, value, text, seconds = pickle.loads(self._links[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self._processes[rank].wait(timeout=PATIENCE)
            return Outcome("died", code, self.stderr(rank))
        return Outcome(kind, value, text, seconds)

    def _stacks(self, rank: int) -> str:
        """The Python stacks of a silent rank's threads."""
        process = self._processes[rank]
        before = len(self.stderr(rank))
        code = process.poll()
        if code is not None:
            return f"exited with {code}\n{self.stderr(rank)}"
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGCONT)
        found, end = "", time.monotonic() + PATIENCE / 8
        while time.monotonic() < end:
            time.sleep(0.25)
            earlier, found = found, self.stderr(rank)[before:]
            if found and found == earlier:  # it is written piece by piece
                break
        return found

    def stderr(self, rank: int) -> str:
        """All that a rank has written to its standard error."""
        return (Path(self._dir.name) / f"stderr-{rank}").read_text(errors="replace")

    def close(self, *, kill: bool = False) -> None:
        """End the processes; ``kill`` does not ask them."""
        for link in self._links:
            link.close()
        for process in self._processes:
            if kill:
                process.kill()
        for process in self._processes:
            try:
                process.wait(timeout=PATIENCE / 4)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._dir.cleanup()


class RankPool:
    """Ranks that are kept from test to test and replaced after a failure.

    With an ``env`` they are interpreters of their own, which read it from their beginning.
    """

    def __init__(self, world_size: int, *, env: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self._env = env
        self._ranks: Ranks | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        backend: str | None = "smddp",
        timeout: float = PATIENCE,
        group_timeout: float = PATIENCE / 2,
    ) -> list[Any]:
        """Run ``function(*args)`` on every rank; return the values by rank.

        ``function`` must be importable (a module-level function). With a ``backend`` the default process
        group exists when it runs, with ``group_timeout`` seconds as its timeout; without one only the usual
        environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) is set. The group is kept for the
        next call that asks for the same backend.

        Raises:
            RankFailed: a rank raised, died or did not answer within ``timeout`` seconds.
        """
        if self._ranks is None:
            interpreters = self.world_size if self._env is not None else self.world_size == WITH_INTERPRETER
            self._ranks = Ranks(self.world_size, env=self._env, forked=self.world_size - interpreters)
        per_rank = [args] * self.world_size
        self._ranks.call(function, per_rank, backend=backend, timeout=timeout, group_timeout=group_timeout)
        outcomes = self._ranks.answers()
        if any(outcome.kind != "value" for outcome in outcomes):
            self.close(kill=True)
            raise RankFailed(describe(function, outcomes), outcomes)
        return [outcome.value for outcome in outcomes]

    def close(self, *, kill: bool = False) -> None:
        """End the pool's processes, if there are any."""
        if self._ranks is not None:
            self._ranks.close(kill=kill)
            self._ranks = None


@contextmanager
def started(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    per_rank_args: Sequence[tuple[Any, ...]] | None = None,
    backend: str | None = "smddp",
    timeout: float = PATIENCE,
    group_timeout: float = PATIENCE / 2,
    env: Mapping[str, str] | None = None,
) -> Iterator[Ranks]:
    """A function that fresh processes run which may die; ask :meth:`Ranks.answers` for what they did.

    The processes are forks of one that has imported torch; with an ``env`` they are interpreters of their
    own, which read it from their beginning.
    """
    ranks = Ranks(world_size, env=env, forked=world_size if env is None else 0)
    try:
        arguments = per_rank_args if per_rank_args is not None else [args] * world_size
        ranks.call(function, arguments, backend=backend, timeout=timeout, group_timeout=group_timeout)
        yield ranks
    finally:
        ranks.close(kill=True)


def run_once(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    meanwhile: Callable[[Ranks], None] | None = None,
    silent: Collection[int] = (),
    **options: Any,
) -> list[Outcome]:
    """Run a function on fresh processes that may die; return every rank's :class:`Outcome`, raise nothing.

    ``options`` are those of :func:`started`. ``meanwhile`` runs in the test's own process while the ranks
    work, for example to kill one of them. ``silent`` ranks will not answer: nobody waits for them.
    """
    with started(world_size, function, *args, **options) as ranks:
        if meanwhile is not None:
            meanwhile(ranks)
        return ranks.answers(silent=silent)


def describe(function: Callable[..., Any], outcomes: Sequence[Outcome]) -> str:
    """One text with what each rank did, the failures in full."""
    out = io.StringIO()
    out.write(f"{function.__name__} failed\n")
    for rank, outcome in enumerate(outcomes):
        out.write(f"--- rank {rank}: {outcome.kind} {outcome.value!r}\n{outcome.text}\n")
    return out.getvalue()


def _prepare_group(backend: str | None, rank: int, world_size: int, port: int, group_timeout: float) -> None:
    """Leave the wanted default process group in place, replacing another one."""
    import torch.distributed as dist

    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    settings = (backend, group_timeout)
    if dist.is_initialized():
        if getattr(_prepare_group, "current", None) == settings:
            return
        dist.destroy_process_group()
    if backend is None:
        return
    if "smddp" in backend:
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout),
    )
    _prepare_group.current = settings  # type: ignore[attr-defined]


def _forget_smp() -> None:
    """Every function begins without the ``smp.init`` of those before it."""
    init = sys.modules.get("opensmd.modelparallel.init")
    if init is not None:
        init.shutdown()


def _serve(rank: int, world_size: int, address: str, key: bytes) -> None:
    """A rank's main loop: receive a function, run it, answer."""
    from multiprocessing.connection import Client

    import torch

    from tests.support.kept_groups import groups_outlive

    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    link = Client(address, family="AF_UNIX", authkey=key)
    link.send(rank)
    while True:
        try:
            request = link.recv_bytes()
        except EOFError:
            return
        started = time.monotonic()
        try:
            function, args, backend, port, group_timeout = pickle.loads(request)
            _forget_smp()
            _prepare_group(backend, rank, world_size, port, group_timeout)
            started = time.monotonic()
            with groups_outlive():
                value = function(*args)
            answer = pickle.dumps(("value", value, "", time.monotonic() - started))
            del value
        except BaseException as error:
            text = traceback.format_exc()
            seconds = time.monotonic() - started
            try:
                answer = pickle.dumps(("error", error, text, seconds))
                pickle.loads(answer)
            except Exception:
                answer = pickle.dumps(
                    ("error", RuntimeError(f"{type(error).__name__}: {error}"), text, seconds)
                )
        link.send_bytes(answer)


if __name__ == "__main__":
    without_collector()
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], bytes.fromhex(sys.argv[4]))

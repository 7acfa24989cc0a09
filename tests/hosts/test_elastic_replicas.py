"""Replicas on two hosts, which are network namespaces: one drops out, and joins again from the other."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.hosts.networks import ADDRESSES

from tests.faults.elastic_replicas import require_undisturbed, run_killing
from tests.scripts.test_several_hosts import SSH
from tests.scripts.test_smddp_scripts import environment
from tests.support.forked_jobs import start_job
from tests.support.patience import PATIENCE
from tests.support.ports import free_port

# A replica is missed once the timeout of its job, a minute, is over where machine or network are that slow.
pytestmark = pytest.mark.timeout(600)


class OnBothHosts:
    """The job of one smdrun, done by two; looks like the one."""

    def __init__(
        self, hosts: tuple[str, str], command: Sequence[str], cwd: Path, env: Mapping[str, str], told: Path
    ) -> None:
        place = ["--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", str(free_port())]
        self._told = told
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._jobs = []
        for number, host in enumerate(hosts):
            words = ["2" if word == "4" else word for word in command]  # ranks of each
            words[3:3] = [*place, "--node-rank", str(number)]
            own = {**env, "OPENSMD_HOST_ID": f"host {number}"}
            stderr = told.with_name(f"told-{number}")
            self._jobs.append(start_job(words, cwd=cwd, env=own, network=host, stderr=stderr))
        for job in self._jobs:
            threading.Thread(target=self._read, args=(job,), daemon=True).start()

    @property
    def stdout(self) -> Iterator[str]:
        """The lines of both, as they come."""
        for _ in self._jobs:
            yield from iter(self._lines.get, None)

    def wait(self, timeout: float) -> int:
        """The worse of both statuses."""
        status = max(job.wait(timeout) for job in self._jobs)
        texts = [self._told.with_name(f"told-{number}").read_text() for number in range(len(self._jobs))]
        self._told.write_text("".join(texts))
        return status

    def kill(self) -> None:
        """End both."""
        for job in self._jobs:
            job.kill()

    def _read(self, job: Any) -> None:
        for line in job.stdout:
            self._lines.put(line)
        self._lines.put(None)


def test_a_replica_that_loses_a_process_drops_out_and_joins_from_another_host(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENSMD_JOB_SECRET": "of the two hosts alone"}

    def start(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stderr: Path) -> OnBothHosts:
        return OnBothHosts(hosts, command, cwd, env, stderr)

    run = run_killing(tmp_path, 2, random.Random(3), env, start=start)
    require_undisturbed(run, kills=2)


def test_one_command_runs_the_replicas_of_all_its_hosts(hosts: tuple[str, str], tmp_path: Path) -> None:
    places = ["--hosts", ",".join(f"{address}:2" for address in ADDRESSES), "--ssh", SSH]
    places += ["--master-port", str(free_port())]
    namespaces = ",".join(f"{address}={name}" for address, name in zip(ADDRESSES, hosts, strict=True))
    env = environment(OMP_NUM_THREADS="1", SSH_NAMESPACES=namespaces)

    def start(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stderr: Path) -> Any:
        at = command.index("-n")
        return start_job([*command[:at], *places, *command[at + 2 :]], cwd=cwd, env=env, stderr=stderr)

    require_undisturbed(run_killing(tmp_path, 2, random.Random(5), env, start=start), kills=2)


def test_the_hosts_end_together_with_the_failures_of_their_own_ranks(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nraise ValueError('rank ' + os.environ['RANK'])\n")
    command = ["smdrun", "-n", "1", "--elastic-replicas", "2", "--nnodes", "2", "--master-addr", ADDRESSES[0]]
    command += ["--master-port", str(free_port())]
    jobs = [
        start_job([*command, "--node-rank", node, script], cwd=tmp_path, env=dict(os.environ), network=host)
        for node, host in enumerate(hosts)
    ]
    for node, job in enumerate(jobs):
        _, told = job.communicate(PATIENCE)
        assert job.wait(PATIENCE) == 1, told
        assert f"ValueError: rank {node}" in told

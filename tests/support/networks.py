"""Scripts whose ranks are in two network namespaces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import PIPE

from benchmarks.hosts.networks import ADDRESSES, CABLE

from tests.support.forks import ForkedProcess, as_main
from tests.support.patience import PATIENCE
from tests.support.ports import free_port

__all__ = ["assert_each_prints_ok", "started"]

BEGIN = """
import contextlib, os, pathlib, sys, time, torch, torch.distributed as dist
from datetime import timedelta
import smdistributed.dataparallel.torch.torch_smddp
torch.set_num_threads(1)

@contextlib.contextmanager
def failing_together(ranks):
    # Rank 0 serves the store, in which the others look for the reason.
    try:
        yield
    except Exception:
        pathlib.Path("failed-" + os.environ["RANK"]).touch()
        while len(list(pathlib.Path.cwd().glob("failed-*"))) < ranks:
            time.sleep(0.05)
        raise
"""
JOIN = """
dist.init_process_group("smddp", timeout=timedelta(seconds=float(sys.argv[1])))
"""


@contextlib.contextmanager
def started(
    hosts: tuple[str, str],
    script: Path,
    text: str,
    *,
    size: int,
    timeout: float,
    env: Mapping[str, str],
    join: str = JOIN,
) -> Iterator[list[ForkedProcess]]:
    """Half of the ranks in each namespace, as pods are started whose master is told that it is localhost."""
    script.write_text(BEGIN + join + text)
    port = str(free_port())
    processes = []
    for rank in range(size):
        host = rank * 2 // size
        env_of_rank = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENSMD_HOST_ID": f"host {host}",
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "MASTER_ADDR": ADDRESSES[0] if rank else "localhost",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            **env,
        }
        processes.append(
            ForkedProcess(
                as_main,
                str(script),
                [str(timeout)],
                cwd=script.parent,
                env=env_of_rank,
                stdout=PIPE,
                stderr=PIPE,
                network=hosts[host],
            )
        )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def assert_each_prints_ok(hosts: tuple[str, str], script: Path, text: str, *, size: int) -> None:
    """Run ranks in both namespaces to their end; each is to print "ok" and its number, and nothing else."""
    env = {"GLOO_SOCKET_IFNAME": CABLE}
    with started(hosts, script, text, size=size, timeout=PATIENCE, env=env) as processes:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=PATIENCE)
            assert out.strip() == f"ok {rank}", err

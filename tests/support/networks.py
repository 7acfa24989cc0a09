"""Scripts whose ranks are in two network namespaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.hosts.networks import ADDRESSES, CABLE

from tests.support.patience import PATIENCE
from tests.support.ranks import ROOT, free_port

__all__ = ["assert_each_prints_ok", "started"]

BEGIN = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
import smdistributed.dataparallel.torch.torch_smddp
torch.set_num_threads(1)
dist.init_process_group("smddp", timeout=timedelta(seconds=float(sys.argv[1])))
"""


@contextlib.contextmanager
def started(
    hosts: tuple[str, str], script: Path, text: str, *, size: int, timeout: float, env: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Half of the ranks in each namespace, as pods are started whose master is told that it is localhost."""
    script.write_text(BEGIN + text)
    port = str(free_port())
    processes = []
    for rank in range(size):
        host = rank * 2 // size
        full = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "OPENSMD_HOST_ID": f"host {host}",
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "MASTER_ADDR": ADDRESSES[0] if rank else "localhost",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            **env,
        }
        command = ["ip", "netns", "exec", hosts[host], sys.executable, str(script), str(timeout)]
        processes.append(
            subprocess.Popen(command, env=full, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
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

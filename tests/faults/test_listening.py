"""On one host nothing of a job listens where another machine could reach it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.deprecated as legacy

from opensmd.collectives.stores.listening import bound_socket
from opensmd.legacy.rendezvous.host import is_local
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import Outcome, run_once

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = {"127.0.0.1", "::1"}


def own_listeners() -> set[str]:
    """The addresses at which this process listens."""
    listening = psutil.Process().net_connections("tcp")
    return {connection.laddr.ip for connection in listening if connection.status == psutil.CONN_LISTEN}


def run_groups() -> dict[str, set[str]]:
    found = {"smddp": own_listeners()}
    os.environ["OPENSMD_NATIVE"] = "0"
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    found["smddp over Gloo"] = own_listeners()
    return found


def run_legacy(methods: list[str]) -> dict[str, set[str]]:
    os.environ["OPENSMD_LEGACY_ENGINE"] = "gloo"
    found = {}
    for method in methods:
        legacy.init_process_group("tcp", method, rank=int(os.environ["RANK"]), world_size=2)
        legacy.all_reduce(torch.ones(1))
        found[method] = own_listeners()
        legacy.destroy_process_group()
    return found


def check(outcomes: list[Outcome], stages: int) -> None:
    for outcome in outcomes:
        assert outcome.kind == "value", outcome.text
        assert len(outcome.value) == stages
        for stage, addresses in outcome.value.items():
            assert addresses <= LOOPBACK, (stage, addresses)
    assert any(addresses for outcome in outcomes for addresses in outcome.value.values())


def test_ranks_of_one_host_listen_on_the_loopback_alone() -> None:
    check(run_once(2, run_groups), 2)


def test_the_legacy_package_listens_where_its_address_says(tmp_path: Path) -> None:
    assert is_local(str(tmp_path / "meet"))
    methods = [f"tcp://127.0.0.1:{free_port()}", f"tcp://localhost:{free_port()}", f"file://{tmp_path}/meet"]
    check(run_once(2, run_legacy, methods, backend=None), 3)


JOB = """
import os, psutil, torch
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group("smddp")
gloo = dist.new_group(backend="gloo")
dist.all_reduce(torch.ones(1), group=gloo)
if dist.get_rank() == 0:
    launcher = psutil.Process().parent()
    for process in (launcher, *launcher.children(recursive=True)):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                print("listens", connection.laddr.ip)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    print("keys", [key for key in store.list_keys() if "rendezvous" in key or "torch." in key])
dist.barrier()
dist.destroy_process_group()
"""


def test_a_job_of_smdrun_listens_on_the_loopback_and_keeps_no_state_of_its_agent_in_a_store(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "opensmd.launch.cli", "--no-prefix", "-n", "2", str(tmp_path / "job.py")]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    listening = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("listens")]
    assert listening and set(listening) <= LOOPBACK
    assert "keys []" in done.stdout


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_is_bound_to_the_loopback_that_it_is_given(host: str) -> None:
    bound = bound_socket(host, 0)
    assert bound is not None
    with bound:
        assert bound.getsockname()[0] == "127.0.0.1"


def test_a_store_listens_everywhere_only_where_its_address_is_a_name_or_not_of_this_host() -> None:
    assert bound_socket("some-host.example", 0) is None
    assert bound_socket("192.0.2.1", 0) is None

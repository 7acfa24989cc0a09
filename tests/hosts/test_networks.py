"""Ranks in two network namespaces with a cable between them, where this user may make such."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.hosts.networks import ADDRESSES, CABLE

from tests.support.forked_jobs import run_job
from tests.support.forks import ForkedProcess
from tests.support.jobs import both
from tests.support.networks import assert_each_prints_ok, started
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import ROOT

TRAIN = """
for count in (1, 1000, 1_000_000):
    tensor = torch.full((count,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    assert bool((tensor == 10).all())
found = [None] * 4
dist.all_gather_object(found, dist.get_rank())
assert found == [0, 1, 2, 3]
import smdistributed.modelparallel.torch as smp
smp.init({"partitions": 4})
assert (smp.local_rank(), smp.local_size()) == (dist.get_rank() % 2, 2)
print("ok", dist.get_rank(), flush=True)
dist.destroy_process_group()
"""
# The short timeout comes when all ranks are there, however long a busy machine takes for that.
UNTIL_CUT = """
dist.barrier()
print("ready", flush=True)
while not pathlib.Path("all are ready").exists():
    time.sleep(0.05)
dist.group.WORLD.set_timeout(timedelta(seconds=3))
while True:
    dist.all_reduce(torch.ones(100_000))
"""
MAKE_UNTIL_CUT = """
dist.barrier()
print("ready", flush=True)
while not pathlib.Path("all are ready").exists():
    time.sleep(0.05)
while True:
    dist.new_group(timeout=timedelta(seconds=3))
"""
# Each rank has a partner on the other host, and large data are nearly always half through.
UNTIL_KILLED = """
rank, half = dist.get_rank(), dist.get_world_size() // 2
pairs = [dist.new_group([first, first + half]) for first in range(half)]
pair = pairs[rank % half]
data = torch.ones(600_000, dtype=torch.int64)
partner = (rank + half) % (2 * half)
dist.barrier()
print("ready", flush=True)
while True:
    if rank % 2:
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=pair)
    elif rank < half:
        dist.recv(data, partner, group=pair)
    else:
        dist.send(data, partner, group=pair)
"""


def await_ready(processes: list[ForkedProcess]) -> None:
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate(timeout=PATIENCE)[1]


def test_ranks_in_two_networks_train_together(hosts: tuple[str, str], tmp_path: Path) -> None:
    assert_each_prints_ok(hosts, tmp_path / "script.py", TRAIN, size=4)


@pytest.mark.parametrize("text", [UNTIL_CUT, MAKE_UNTIL_CUT], ids=["in calls", "while groups are made"])
def test_all_processes_end_soon_after_the_link_between_their_hosts_is_cut(
    hosts: tuple[str, str], tmp_path: Path, text: str
) -> None:
    env = {"GLOO_SOCKET_IFNAME": CABLE}
    with started(hosts, tmp_path / "script.py", text, size=4, timeout=PATIENCE, env=env) as processes:
        await_ready(processes)
        (tmp_path / "all are ready").touch()
        subprocess.run(["ip", "-n", hosts[1], "link", "set", CABLE, "down"], check=True)
        begin = time.monotonic()
        for process in processes:
            _, err = process.communicate(timeout=PATIENCE)
            assert "DistBackendError" in err
        assert time.monotonic() - begin < 60  # nearly all of which is for a busy machine


CANNOT_JOIN = """
with failing_together(2):
    dist.init_process_group("smddp", timeout=timedelta(seconds=float(sys.argv[1])))
"""


def test_a_host_whose_name_is_the_loopback_is_told_how_to_say_which_network(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    script = tmp_path / "script.py"
    with started(hosts, script, "", size=2, timeout=PATIENCE, env=env, join=CANNOT_JOIN) as processes:
        for process in processes:
            _, err = process.communicate(timeout=PATIENCE)
            assert "on ranks 0, 1 (" in err and "Set GLOO_SOCKET_IFNAME on all ranks" in err, err


FAIL_ON_ANOTHER_HOST = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("smddp", timeout=timedelta(seconds=60))
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("the batch is empty")
dist.all_reduce(torch.ones(3))
"""


def test_smdrun_says_which_rank_of_another_host_failed_first(hosts: tuple[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAIL_ON_ANOTHER_HOST)
    place = ["--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", str(free_port())]

    def run_on(node: int) -> str:
        env = {**os.environ, "GLOO_SOCKET_IFNAME": CABLE, "OPENSMD_HOST_ID": f"host {node}"}
        smdrun = ["smdrun", "-n", "1", *place, "--node-rank", node, "--output", tmp_path / "out", script]
        return run_job(smdrun, cwd=tmp_path, env=env, network=hosts[node]).stderr

    errors = both(lambda: run_on(0), lambda: run_on(1))
    assert "smdrun: rank 1 failed first: ValueError: the batch is empty" in errors[1]
    assert "smdrun: rank 1 of another smdrun failed first: see the output of that one" in errors[0]
    assert re.search(r"smdrun: rank 0 failed after it: DistBackendError: .*rank 1 on \S+ has died", errors[0])


WAIT_IN_NETWORKS = """
import time
from benchmarks.hosts.networks import two_networks
with two_networks() as names:
    print(*names, flush=True)
    time.sleep(1000)
"""


def test_a_benchmark_that_is_terminated_takes_its_networks_away(hosts: tuple[str, str]) -> None:
    command = [sys.executable, "-c", WAIT_IN_NETWORKS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        made = set(benchmark.stdout.readline().split())
        assert len(made) == 2 and made <= networks_here()
        benchmark.terminate()
    assert not made & networks_here()


def networks_here() -> set[str]:
    """The names of all network namespaces."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def test_who_exchanges_large_data_with_a_rank_that_is_killed_hears_of_it_before_the_timeout(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    env = {"GLOO_SOCKET_IFNAME": CABLE}
    script = tmp_path / "script.py"
    with started(hosts, script, UNTIL_KILLED, size=8, timeout=PATIENCE / 2, env=env) as processes:
        await_ready(processes)
        time.sleep(0.3)
        for process in processes[4:]:
            process.kill()
        for rank, process in enumerate(processes[:4]):
            _, err = process.communicate(timeout=PATIENCE)
            assert re.search(f"rank {rank} on .*: rank {rank + 4} on .* has died", err), err

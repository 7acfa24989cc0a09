"""Where ranks meet: the same answer on every rank of a job, another one for another job."""

from __future__ import annotations

import os
import socket

import pytest

from opensmd.environment.detect import Launch
from opensmd.environment.master import (
    FIRST_PORT,
    PORTS,
    ancestors,
    first_host,
    is_free,
    master_address,
    master_port,
)

ONE_HOST = Launch("MPI (PMI)", 0, 2, 0, 2)
TWO_HOSTS = Launch("Open MPI", 0, 4, 0, 2)


def parents_of(launcher: int, *, shells: int = 0) -> list[tuple[int, str]]:
    return [*((9000 + i, "sh") for i in range(shells)), (launcher, "hydra_pmi_proxy"), (1, "init")]


def test_ranks_of_one_job_meet_at_one_port_also_behind_a_shell() -> None:
    ports = {master_port(ONE_HOST, {}, parents_of(700, shells=n), own_pid=800 + n) for n in range(3)}
    assert len(ports) == 1


def test_jobs_started_side_by_side_meet_at_different_ports() -> None:
    ports = [master_port(ONE_HOST, {}, parents_of(pid), own_pid=1) for pid in range(700, 900)]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("pid", [1, 700, 32768, 4194303])
def test_ports_stay_below_the_ephemeral_ones(pid: int) -> None:
    assert FIRST_PORT <= master_port(ONE_HOST, {}, parents_of(pid), own_pid=1) < FIRST_PORT + PORTS == 32768


def test_on_several_hosts_the_job_id_gives_the_port_and_not_the_local_parent() -> None:
    job = {"PMIX_NAMESPACE": "prterun-host-77@1"}
    here = master_port(TWO_HOSTS, job, parents_of(10), own_pid=1)
    assert here == master_port(TWO_HOSTS, job, parents_of(99), own_pid=2)
    assert here != master_port(TWO_HOSTS, {"PMIX_NAMESPACE": "prterun-host-78@1"}, parents_of(10), own_pid=1)


def test_pods_and_containers_meet_at_the_port_that_their_platform_names() -> None:
    pod = Launch("Kubeflow Trainer", 0, 2, None, None)
    assert master_port(pod, {"PET_MASTER_PORT": "29400"}, parents_of(10), own_pid=1) == 29400
    assert master_port(pod, {}, parents_of(10), own_pid=1) == 29500
    assert master_port(Launch("SageMaker", 0, 2, 0, 1), {"SM_HOSTS": '["a", "b"]'}, [], own_pid=1) == 7777


def test_without_a_known_launcher_the_parent_is_the_launcher() -> None:
    parents = [(55, "my-launcher"), (1, "init")]
    assert master_port(ONE_HOST, {}, parents, own_pid=60) == master_port(ONE_HOST, {}, parents, own_pid=61)


@pytest.mark.parametrize(
    ("launch", "environ", "address"),
    [
        (None, {}, "127.0.0.1"),
        (ONE_HOST, {}, "127.0.0.1"),
        (TWO_HOSTS, {}, None),
        (TWO_HOSTS, {"SM_HOSTS": '["algo-1", "algo-2"]'}, "algo-1"),
        (Launch("Slurm", 0, 4, 0, 2), {"SLURM_STEP_NODELIST": "gpu[07-09,12],cpu1"}, "gpu07"),
        (Launch("Slurm", 0, 4, 0, 2), {"SLURM_JOB_NODELIST": "a1,a2"}, "a1"),
        (
            Launch("Kubeflow Trainer", 0, 2, None, None),
            {"PET_MASTER_ADDR": "train-node-0-0.train"},
            "train-node-0-0.train",
        ),
    ],
)
def test_the_master_is_the_first_host_where_something_tells_it(
    launch: Launch | None, environ: dict[str, str], address: str | None
) -> None:
    assert master_address(launch, environ) == address


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("n1", "n1"), ("n[1-3]", "n1"), ("rack[2,5]-ib", "rack2-ib"), ("a,b", "a"), ("", None)],
)
def test_the_first_host_of_a_slurm_list_is_read(nodelist: str, host: str | None) -> None:
    assert first_host(nodelist) == host


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)


def test_the_parents_of_this_process_are_found() -> None:
    assert ancestors()[0][0] == os.getppid()

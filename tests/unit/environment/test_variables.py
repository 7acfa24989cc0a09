"""What is added to a rank's environment, and what is left alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings

import pytest

from opensmd.environment.master import fold
from opensmd.environment.variables import NOTE, current_launch, fill, plan
from tests.support.patience import PATIENCE

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PARENTS = [(700, "hydra_pmi_proxy"), (1, "init")]


def test_a_rank_of_mpi_gets_what_torch_and_a_container_would_say() -> None:
    assert plan(HYDRA, PARENTS, 800).variables == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(fold(700)),
        "SMDATAPARALLEL_LOCAL_RANK": "1",
        "SMDATAPARALLEL_USE_SINGLENODE": "1",
    }


def test_a_process_started_by_hand_becomes_a_group_of_one() -> None:
    environ: dict[str, str] = {}
    assert fill(environ) is None
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


@pytest.mark.parametrize(
    ("started", "local_rank"),
    [
        ({}, None),
        ({"SM_HOSTS": '["algo-1"]'}, "0"),
        ({"SM_TRAINING_ENV": "{}"}, "0"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "1"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "0"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host1"}, None),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host1", "LOCAL_RANK": "1"}, "1"),
    ],
)
def test_the_local_rank_is_set_where_a_launcher_a_container_or_the_user_has_given_a_rank(
    started: dict[str, str], local_rank: str | None
) -> None:
    environ = dict(started)
    fill(environ)
    assert environ.get("LOCAL_RANK") == local_rank


def test_a_lone_process_takes_another_port_when_its_own_is_taken() -> None:
    environ: dict[str, str] = {}
    fill(environ)
    with socket.socket() as server:
        server.bind(("127.0.0.1", int(environ["MASTER_PORT"])))
        server.listen()
        second: dict[str, str] = {}
        fill(second)
    assert second["MASTER_PORT"] != environ["MASTER_PORT"]


def test_what_the_user_set_stays() -> None:
    environ = {**HYDRA, "MASTER_PORT": "29511", "LOCAL_RANK": "0", "SMDATAPARALLEL_LOCAL_RANK": "7"}
    fill(environ)
    assert (environ["MASTER_PORT"], environ["LOCAL_RANK"]) == ("29511", "0")
    assert environ["SMDATAPARALLEL_LOCAL_RANK"] == "7"


def test_filling_twice_changes_nothing_and_does_not_turn_a_lone_process_into_a_job() -> None:
    environ: dict[str, str] = {}
    fill(environ)
    first = dict(environ)
    fill(environ)
    assert environ == first
    assert current_launch(environ) is None


def test_a_job_started_from_a_lone_process_is_not_taken_for_part_of_it() -> None:
    environ: dict[str, str] = {}
    fill(environ)
    environ[NOTE] = environ[NOTE].replace(f'"pid": {os.getpid()}', '"pid": 1')
    child = {**environ, **HYDRA}
    launch = fill(child)
    assert launch is not None and (launch.rank, launch.size) == (1, 2)
    assert (child["RANK"], child["WORLD_SIZE"], child["LOCAL_RANK"]) == ("1", "2", "1")


def test_ranks_that_a_lone_process_starts_itself_meet_where_it_does() -> None:
    environ: dict[str, str] = {}
    fill(environ)
    environ[NOTE] = environ[NOTE].replace(f'"pid": {os.getpid()}', '"pid": 1')
    child = {**environ, "WORLD_SIZE": "2", "LOCAL_RANK": "1"}  # as Lightning starts them
    fill(child)
    assert (child["WORLD_SIZE"], child["LOCAL_RANK"]) == ("2", "1")
    assert (child["MASTER_ADDR"], child["MASTER_PORT"]) == (environ["MASTER_ADDR"], environ["MASTER_PORT"])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_set_by_hand_after_the_import_counts(rank: str) -> None:
    environ: dict[str, str] = {}
    fill(environ)
    environ.update(RANK=rank, WORLD_SIZE="2")
    launch = current_launch(environ)
    assert launch is not None and (launch.rank, launch.size) == (int(rank), 2)
    fill(environ)
    assert (environ["RANK"], environ["LOCAL_RANK"]) == (rank, rank)
    assert "LOCAL_WORLD_SIZE" not in environ  # the other rank may be on another host


def test_ranks_on_several_hosts_without_an_address_are_told_how_to_give_one() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.warns(UserWarning, match=r"several hosts.*-x MASTER_ADDR"):
        fill(environ)
    assert "MASTER_ADDR" not in environ
    assert environ["SMDATAPARALLEL_USE_HOMOGENEOUS"] == "1"


def test_ranks_on_several_hosts_with_an_address_are_given_torchs_port() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_ADDR": "host1",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(environ)
    assert environ["MASTER_PORT"] == "29500"
    assert environ["SMDATAPARALLEL_SERVER_ADDR"] == "host1"
    assert environ["SMDATAPARALLEL_SERVER_PORT"] == "7592"


def test_rank_0_says_when_the_derived_port_is_taken() -> None:
    environ = {**HYDRA, "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
    probe = dict(environ)
    fill(probe)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", int(probe["MASTER_PORT"])))
        server.listen()
        with pytest.warns(UserWarning, match="is taken by another program"):
            fill(environ)


@pytest.mark.processes
def test_importing_the_library_changes_no_affinity_and_starts_no_torch() -> None:
    code = (
        "import gc, os, sys\n"
        "gc.disable()\n"
        "before = os.sched_getaffinity(0)\n"
        "import opensmd.launch.rank\n"
        "assert 'torch' not in sys.modules\n"
        "import smdistributed.dataparallel.torch.torch_smddp\n"
        "gc.freeze()\n"
        "assert os.sched_getaffinity(0) == before\n"
        "assert os.environ['RANK'] == '0'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "2"), ("RANK", "1")])
def test_half_a_place_is_not_made_up_to_one_that_waits_for_nobody(name: str, value: str) -> None:
    environ = {name: value}
    assert fill(environ) is None
    assert {"RANK", "WORLD_SIZE"} & set(environ) == {name}  # torch names the missing one
    other = {"WORLD_SIZE": "RANK", "RANK": "WORLD_SIZE"}[name]
    environ[other] = {"RANK": "1", "WORLD_SIZE": "2"}[other]
    assert fill(environ) is not None

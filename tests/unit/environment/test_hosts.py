"""Which host of a job this is, from what a container or a pod says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opensmd.environment.detect import Launch
from opensmd.environment.hosts import (
    Place,
    check_processes_were_started,
    hosts_of_container,
    place_of_container,
    place_of_pod,
)
from opensmd.environment.master import master_address, master_port

ACROSS_HOSTS = Launch("SageMaker", 0, 2, 0, 1)


@given(st.lists(st.text(), unique=True))
def test_hosts_are_read_whatever_their_names(names: list[str]) -> None:
    environ = {"SM_HOSTS": json.dumps(names)}
    assert hosts_of_container(environ) == names
    assert master_address(ACROSS_HOSTS, environ) == (names[0] if names else None)
    for number, name in enumerate(names):
        place = place_of_container({**environ, "SM_CURRENT_HOST": name})
        assert place == (Place(number, len(names)) if len(names) > 1 else None)


@pytest.mark.parametrize("text", ["", "algo-1", '["algo-1", ', '{"algo-1": 1}', "[1, 2]", "null"])
def test_what_is_no_list_of_names_lists_no_hosts(text: str) -> None:
    assert hosts_of_container({"SM_HOSTS": text}) == []
    assert place_of_container({"SM_HOSTS": text, "SM_CURRENT_HOST": "algo-1"}) is None


def test_a_container_that_is_not_in_the_list_has_no_place() -> None:
    assert place_of_container({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"}) is None
    assert place_of_container({"SM_HOSTS": '["a", "b"]'}) is None


def test_the_port_of_a_container_is_the_same_on_all_hosts() -> None:
    environ = {"SM_HOSTS": '["a", "b"]'}
    ports = {master_port(ACROSS_HOSTS, environ, [(pid, "python")], own_pid=pid) for pid in (7, 8)}
    assert len(ports) == 1


@pytest.mark.parametrize("count", ["", "1", "1:1"])
def test_a_pod_alone_needs_no_place(count: str) -> None:
    assert place_of_pod({"PET_NNODES": count, "PET_NODE_RANK": "nonsense"}) is None


def test_pods_with_one_process_each_are_numbered() -> None:
    environ = {"PET_NNODES": "3", "PET_NODE_RANK": "2"}
    assert place_of_pod(environ) == place_of_pod({**environ, "PET_NPROC_PER_NODE": "1"}) == Place(2, 3)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PET_NPROC_PER_NODE": "4"}, "PET_NNODES=2 and PET_NPROC_PER_NODE=4 ask torchrun"),
        ({"PET_NNODES": "2:4"}, "PET_NNODES=2:4 and PET_NPROC_PER_NODE=1 ask torchrun"),
        ({}, "PET_NODE_RANK, this host's number from 0 to 1; it is None"),
        ({"PET_NODE_RANK": "2"}, "this host's number from 0 to 1; it is '2'"),
        ({"PET_NODE_RANK": "first"}, "PET_NODE_RANK is 'first'; a whole number was expected"),
    ],
)
def test_a_pod_that_torchrun_was_to_serve_is_told_so(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_of_pod({"PET_NNODES": "2", **environ})


def test_variables_that_count_processes_nobody_started_are_refused() -> None:
    environ = {"PET_NPROC_PER_NODE": "4", "PET_NNODES": "2", "PET_NODE_RANK": "1"}
    with pytest.raises(ValueError, match="WORLD_SIZE=8 counts 4 processes in each of 2 pods"):
        check_processes_were_started(environ, rank=1, size=8)
    check_processes_were_started(environ, rank=4, size=8)  # torchrun numbers the processes
    check_processes_were_started(environ, rank=1, size=2)  # one process a pod
    check_processes_were_started({}, rank=0, size=8)

"""Private parts of torch that the collectives lean on: fails loudly when torch changes them."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from opensmd.collectives import _torch_internals, backend


def original(name: str) -> object:
    """torch's own function, under the one that the backend put in its place."""
    backend.register()
    return inspect.unwrap(getattr(c10d, name))


def test_torch_is_the_version_that_was_read() -> None:
    assert torch.__version__.split("+")[0].rsplit(".", 1)[0] == "2.13"


def test_monitored_barrier_still_takes_gloo_alone_and_these_arguments() -> None:
    function = original("monitored_barrier")
    assert list(inspect.signature(function).parameters) == ["group", "timeout", "wait_all_ranks"]  # type: ignore[arg-type]
    assert "only implemented for GLOO" in inspect.getsource(function)  # type: ignore[arg-type]


def test_split_group_still_wants_an_accelerator_and_these_arguments() -> None:
    function = original("split_group")
    expected = ["parent_pg", "split_ranks", "timeout", "pg_options", "group_desc", "backend"]
    assert list(inspect.signature(function).parameters) == expected  # type: ignore[arg-type]
    assert "No device associated with the default pg" in inspect.getsource(function)  # type: ignore[arg-type]


def test_the_bookkeeping_of_groups_is_where_it_was() -> None:
    wanted = ["pg", "backend_name", "store", "group_name", "backend_config", "pg_tag", "add_to_default_tag"]
    found = inspect.signature(c10d._register_pg_in_world).parameters
    assert {*wanted, "rank_mapping"} <= set(found)
    assert hasattr(c10d._world, "pg_group_ranks")
    assert callable(c10d._get_default_timeout) and callable(c10d._check_valid_timeout)


def test_a_script_that_sets_its_own_master_port_is_not_sent_to_the_launchers_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    for name, value in (
        ("MASTER_ADDR", "here"),
        ("MASTER_PORT", "1"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ):
        monkeypatch.setenv(name, value)
    plain = inspect.unwrap(rendezvous._torchelastic_use_agent_store)
    monkeypatch.setattr(rendezvous, "_torchelastic_use_agent_store", plain)
    _torch_internals.let_scripts_choose_where_to_meet("here:1")
    assert rendezvous._torchelastic_use_agent_store()
    monkeypatch.setenv("MASTER_PORT", "2")
    assert not rendezvous._torchelastic_use_agent_store()
    assert "is_master=False" in inspect.getsource(rendezvous._create_c10d_store)


def test_registering_twice_changes_nothing() -> None:
    backend.register()
    first = c10d.monitored_barrier
    backend.register()
    assert c10d.monitored_barrier is first
    assert torch.distributed.monitored_barrier is first
    assert "smddp" in c10d.Backend.backend_list
    assert c10d.Backend.default_device_backend_map["cpu"] == "gloo"

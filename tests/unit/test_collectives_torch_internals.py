"""Private parts of torch that the collectives lean on: fails loudly when torch changes them."""

from __future__ import annotations

import inspect

import torch
from torch.distributed import distributed_c10d as c10d

from opensmd.collectives import backend


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


def test_registering_twice_changes_nothing() -> None:
    backend.register()
    first = c10d.monitored_barrier
    backend.register()
    assert c10d.monitored_barrier is first
    assert torch.distributed.monitored_barrier is first
    assert "smddp" in c10d.Backend.backend_list
    assert c10d.Backend.default_device_backend_map["cpu"] == "gloo"

"""Private parts of torch that the collectives lean on: fails loudly when torch changes them."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from opensmd.collectives import _torch_internals, backend

pytestmark = pytest.mark.newest


def original(name: str) -> object:
    """torch's own function, under the one that the backend put in its place."""
    backend.register()
    return inspect.unwrap(getattr(c10d, name))


def test_monitored_barrier_still_takes_these_arguments_and_asks_for_a_kind_of_backend() -> None:
    function = original("monitored_barrier")
    assert list(inspect.signature(function).parameters) == ["group", "timeout", "wait_all_ranks"]  # type: ignore[arg-type]
    refusals = (
        "only implemented for GLOO",
        "requires a group with a CPU-capable backend",
    )  # 2.13, since 2.14
    assert sum(text in inspect.getsource(function) for text in refusals) == 1  # type: ignore[arg-type]


def test_split_group_still_takes_these_arguments_and_names_groups_by_this_ranks_count() -> None:
    function = original("split_group")
    expected = ["parent_pg", "split_ranks", "timeout", "pg_options", "group_desc", "backend"]
    assert list(inspect.signature(function).parameters) == expected  # type: ignore[arg-type]
    assert "_process_group_name(my_group, use_hashed_name=True)" in inspect.getsource(function)  # type: ignore[arg-type]


def test_split_group_sorts_ranks_and_returns_none_or_does_neither_as_the_installed_torch_does() -> None:
    source = inspect.getsource(original("split_group"))  # type: ignore[arg-type]
    as_new_group = _torch_internals._SPLITS_AS_NEW_GROUP
    assert ("return GroupMember.NON_GROUP_MEMBER" in source) is as_new_group
    assert ("return None" in source) is not as_new_group
    assert ("sorted(split_group)" in source) is not as_new_group


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

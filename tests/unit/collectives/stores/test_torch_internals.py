"""Private parts of torch that make the ranks' store: fails loudly when torch changes them."""

from __future__ import annotations

import importlib
import inspect
import json
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from opensmd.collectives.stores import _torch_internals
from opensmd.environment.variables import NOTE
from tests.support.ports import free_port

pytestmark = pytest.mark.newest


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's module as it is without this package, in a rank of a launcher whose store is at here:1."""
    module = importlib.import_module("torch.distributed.rendezvous")
    for name, value in (
        ("MASTER_ADDR", "here"),
        ("MASTER_PORT", "1"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ):
        monkeypatch.setenv(name, value)
    for name in ("_torchelastic_use_agent_store", "_create_c10d_store"):
        monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    return module


def test_a_script_that_sets_its_own_master_port_is_not_sent_to_the_launchers_store(
    rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _torch_internals.let_scripts_choose_the_rendezvous("here:1")
    assert rendezvous._torchelastic_use_agent_store()
    monkeypatch.setenv("MASTER_PORT", "2")
    assert not rendezvous._torchelastic_use_agent_store()
    assert "is_master=False" in inspect.getsource(rendezvous._create_c10d_store)


def test_ranks_meet_at_an_address_of_the_scripts_own_under_a_launcher(rendezvous: Any) -> None:
    _torch_internals.listen_where_asked()
    _torch_internals.let_scripts_choose_the_rendezvous("here:1")
    at = f"tcp://127.0.0.1:{free_port()}"
    # rank 0 looked for a store of the launcher's there, too
    store, *place = next(rendezvous.rendezvous(at, 0, 1, timeout=timedelta(seconds=5)))
    assert place == [0, 1]
    assert store.add("ranks", 1) == 1
    assert rendezvous._torchelastic_use_agent_store()


def test_a_rank_that_cannot_be_is_refused_before_it_waits_for_a_rank_0(rendezvous: Any) -> None:
    _torch_internals.listen_where_asked()
    for rank, size, said in (
        (2, 2, "rank 2 cannot be one of 2: ranks go from 0 to 1"),
        (0, 0, "leaves no rank"),
    ):
        with pytest.raises(ValueError, match=said):
            next(rendezvous.rendezvous("tcp://127.0.0.1:1", rank, size, timeout=timedelta(seconds=1)))


def test_a_port_that_is_none_is_refused_as_by_torch(rendezvous: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch_internals.listen_where_asked()
    monkeypatch.setenv("MASTER_PORT", "70000")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    with pytest.raises(ValueError, match="port must have value from 0 to 65535 but was 70000"):
        next(rendezvous.rendezvous("env://", 0, 1, timeout=timedelta(seconds=1)))


def test_a_lone_process_whose_parent_has_the_port_that_was_chosen_for_it_takes_another(
    rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _torch_internals.listen_where_asked()
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def lone() -> Any:
        store, *place = next(
            rendezvous.rendezvous("env://", timeout=timedelta(seconds=5), rank=0, world_size=1)
        )
        assert place == [0, 1]
        return store

    with socket.socket() as parents:
        parents.bind(("127.0.0.1", 0))
        parents.listen()
        port = str(parents.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(dist.DistNetworkError, match="another process has that port"):
            lone()
        monkeypatch.setenv(NOTE, json.dumps({"pid": 1, "set": {"MASTER_PORT": port}}))
        assert lone().add("ranks", 1) == 1


def test_a_name_that_the_host_does_not_know_is_named_as_such(
    rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> OSError:
        return socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def refused(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("no address")

    monkeypatch.setattr(rendezvous, "_create_c10d_store", refused)
    monkeypatch.setattr(_torch_internals, "why_no_connection", unknown)
    _torch_internals.listen_where_asked()
    with pytest.raises(
        dist.DistNetworkError, match=r"did not know 'nowhere' .*Name or service not known.*MASTER_ADDR"
    ):
        next(rendezvous.rendezvous("tcp://nowhere:1", 1, 2, timeout=timedelta(seconds=1)))

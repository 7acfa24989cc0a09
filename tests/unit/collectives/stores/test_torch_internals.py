"""Private parts of torch that make the ranks' store: fails loudly when torch changes them."""

from __future__ import annotations

import importlib
import inspect

import pytest

from opensmd.collectives.stores import _torch_internals

pytestmark = pytest.mark.newest


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
    _torch_internals.let_scripts_choose_the_rendezvous("here:1")
    assert rendezvous._torchelastic_use_agent_store()
    monkeypatch.setenv("MASTER_PORT", "2")
    assert not rendezvous._torchelastic_use_agent_store()
    assert "is_master=False" in inspect.getsource(rendezvous._create_c10d_store)

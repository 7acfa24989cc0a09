"""Which store a rank takes where one follows another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.distributed import DistBackendError, DistNetworkError, PrefixStore, TCPStore

from opensmd.collectives.stores.in_turn import StoresInTurn
from tests.support.patience import PATIENCE
from tests.support.ports import free_port

HOST = "127.0.0.1"


def serve(port: int) -> TCPStore:
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False)


def client(port: int) -> Callable[[], TCPStore]:
    return lambda: TCPStore(HOST, port, is_master=False, wait_for_workers=False)


def test_a_store_that_was_met_before_is_waited_out() -> None:
    port = free_port()
    server, rank_0, rank_1 = serve(port), StoresInTurn(), StoresInTurn()
    store = rank_1.joined((HOST, port), client(port), PATIENCE)
    rank_0.served(server)
    rank_1.remember(PrefixStore("of a group", store))
    with pytest.raises(DistBackendError, match=rf"at {HOST}:{port} is that of the process group before"):
        rank_1.joined((HOST, port), client(port), 0.1)
    rank_0.served(server)  # the same server, for another group
    found = rank_1.joined((HOST, port), client(port), PATIENCE)
    with pytest.raises(DistBackendError, match="group before"):
        rank_1.joined((HOST, port), client(port), 0.1)
    del server
    assert found.port == port


def test_a_store_that_closes_while_a_rank_waits_is_asked_for_again() -> None:
    port = free_port()
    servers, rank_0, rank_1 = [serve(port)], StoresInTurn(), StoresInTurn()
    store = rank_1.joined((HOST, port), client(port), PATIENCE)
    rank_0.served(servers[0])
    rank_1.remember(store)
    calls = []

    def connect() -> TCPStore:
        calls.append(client(port)())
        if len(calls) == 1:
            servers.pop()
            servers.append(serve(port))
            rank_0.served(servers[0])
        return calls[-1]

    assert rank_1.joined((HOST, port), connect, PATIENCE) is calls[1]


def test_a_store_that_closes_while_it_lets_a_rank_in_is_asked_for_again() -> None:
    port = free_port()
    server, rank_0, rank_1 = serve(port), StoresInTurn(), StoresInTurn()
    store = rank_1.joined((HOST, port), client(port), PATIENCE)
    rank_0.served(server)
    rank_1.remember(store)
    broken = [
        DistNetworkError("Failed to recv, got 0 bytes"),
        DistBackendError("what listens did not answer"),
    ]

    def connect() -> TCPStore:
        if broken:
            rank_0.served(server)
            raise broken.pop()
        return client(port)()

    assert rank_1.joined((HOST, port), connect, PATIENCE).port == port
    broken += [DistBackendError("another program has the port")]
    with pytest.raises(DistBackendError, match="another program"):
        rank_1.joined((HOST, port), connect, 0.0)


def test_a_store_without_a_name_is_taken_as_it_is() -> None:
    port = free_port()
    server, rank = serve(port), StoresInTurn()
    for _ in range(2):
        rank.remember(rank.joined((HOST, port), client(port), 0.1))
    assert server.port == port

"""How the agents of a job find each other, and the store that its ranks meet in.

torch's own dynamic rendezvous keeps pickled state in a store that anybody on the network can write to. On
one host there is one agent: what it tells itself stays in its memory, and the ranks' store listens on the
loopback. Between hosts the static rendezvous serves: it keeps nothing pickled, and its store listens at
``--master-addr`` alone where that is an IP address of host 0. With a job's secret the agents believe nothing
in it that was written without.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from opensmd.collectives.sealed import job_secret
from opensmd.collectives.stores.listening import LOOPBACK, served_store
from opensmd.launch.stores.agents_store import AgentsStore
from opensmd.launch.stores.meeting import meeting_store
from opensmd.launch.stores.other_hosts import OtherHosts
from opensmd.launch.stores.sealed_store import SealedStore

__all__ = ["BACKEND", "register"]

BACKEND = "smdrun"
TIMEOUT = 900  # seconds that the agents of several hosts wait for each other


def register() -> None:
    """Let torch's launcher find the rendezvous under :data:`BACKEND`."""
    rendezvous_handler_registry.register(BACKEND, _make)


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    if parameters.max_nodes == 1:
        return OneHost(parameters.run_id, parameters.config.get("before_attempt"))
    host, _, port = parameters.endpoint.rpartition(":")
    return SeveralHosts(
        host.strip("[]"),
        int(port),
        int(parameters.config["rank"]),
        parameters.max_nodes,
        parameters.run_id,
        int(parameters.config.get("timeout", TIMEOUT)),
        parameters.config["others"],
    )


class OneHost(RendezvousHandler):
    """The rendezvous of an agent that is alone.

    Args:
        run_id: the id of the job.
        before_attempt: called before the ranks are started, again if they are; what it raises ends the agent.
    """

    def __init__(self, run_id: str, before_attempt: Callable[[], None] | None = None) -> None:
        self._run_id = run_id
        self._before_attempt = before_attempt or (lambda: None)
        self._ranks_store: TCPStore | None = None

    def get_backend(self) -> str:
        """The handler's name in torch's registry."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks find the store at MASTER_ADDR and MASTER_PORT and serve none themselves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """A place for the agent's own words, and a new store for this attempt of the ranks."""
        self._before_attempt()
        self._ranks_store = served_store(
            LOOPBACK, 0, None, timeout=timedelta(seconds=TIMEOUT), wait_for_workers=False
        )
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self._ranks_store.port))

    def is_closed(self) -> bool:
        """Never: nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """Nobody waits to hear of it."""

    def num_nodes_waiting(self) -> int:
        """None: no other host can join."""
        return 0

    def get_run_id(self) -> str:
        """The id of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Stop serving the ranks."""
        self._ranks_store = None
        return True


class SeveralHosts(StaticTCPRendezvous):
    """torch's static rendezvous, whose store listens only where the agents were sent.

    All hosts begin each attempt of the ranks together.
    """

    def __init__(
        self, host: str, port: int, rank: int, hosts: int, run_id: str, timeout: int, others: OtherHosts
    ) -> None:
        super().__init__(host, port, rank, hosts, run_id, timeout)
        self._others = others

    def get_backend(self) -> str:
        """The handler's name in torch's registry."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Serve the store on host 0, reach it on the others; wait for all."""
        if self._store is None:
            self._store = meeting_store(
                self.master_addr,
                self.master_port,
                serves=self.rank == 0,
                hosts=self.world_size,
                timeout=self.timeout,
            )
        found = super().next_rendezvous()
        self._others.meet(found.store, self.timeout)
        secret, in_vain = job_secret(), self._others.one_has_ended
        store = (
            AgentsStore(found.store, in_vain) if secret is None else SealedStore(found.store, secret, in_vain)
        )
        ranks_store: Any = found.bootstrap_store_info
        return RendezvousInfo(store, found.rank, found.world_size, ranks_store)

    def num_nodes_waiting(self) -> int:
        """None: no host can join. The agent asks while its ranks run: a time to look at the others."""
        self._others.look()
        return 0

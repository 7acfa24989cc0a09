"""How the agents of a job find each other, and the store that its ranks meet in.

torch's own dynamic rendezvous keeps pickled state in a store that anybody on the network can write to. On one
host there is one agent: its own state stays in memory, and the ranks' store listens on the loopback. Between
hosts, torch's static rendezvous is enough: it pickles nothing, and its store listens only at
``--master-addr`` if that is an IP address of host 0. With a job secret, agents ignore values written without
it.
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
    """Make the rendezvous known to torch's launcher as :data:`BACKEND`."""
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
    """The rendezvous of a single agent.

    Args:
        run_id: the id of the job.
        before_attempt: called each time before the ranks are started; what it raises ends the agent. None
            for nothing.
    """

    def __init__(self, run_id: str, before_attempt: Callable[[], None] | None) -> None:
        self._run_id = run_id
        self._before_attempt = before_attempt or (lambda: None)
        self._ranks_store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the handler's name in torch's registry."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: ranks find the store at MASTER_ADDR and MASTER_PORT and serve none themselves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a store in memory for the agent itself, and a new one for this attempt of the ranks."""
        self._before_attempt()
        self._ranks_store = served_store(LOOPBACK, 0, None, timeout=timedelta(seconds=TIMEOUT))
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self._ranks_store.port))

    def is_closed(self) -> bool:
        """False: nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody waits for it."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other host can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Stop serving the ranks."""
        self._ranks_store = None
        return True


class SeveralHosts(StaticTCPRendezvous):
    """torch's static rendezvous, with a store that listens only at the agents' address.

    All hosts start each attempt of the ranks together.
    """

    def __init__(
        self, host: str, port: int, rank: int, hosts: int, run_id: str, timeout: int, others: OtherHosts
    ) -> None:
        super().__init__(host, port, rank, hosts, run_id, timeout)
        self._others = others

    def get_backend(self) -> str:
        """Return the handler's name in torch's registry."""
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
        info = super().next_rendezvous()
        self._others.meet(info.store, self.timeout)
        secret, in_vain = job_secret(), self._others.one_has_ended
        store = (
            AgentsStore(info.store, in_vain) if secret is None else SealedStore(info.store, secret, in_vain)
        )
        ranks_store: Any = info.bootstrap_store_info
        return RendezvousInfo(store, info.rank, info.world_size, ranks_store)

    def num_nodes_waiting(self) -> int:
        """Return 0: no host can join. The agent asks while its ranks run, so look at the other hosts here."""
        self._others.look()
        return 0

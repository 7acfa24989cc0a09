"""A store is named by its address, however many prefixes are around it."""

from __future__ import annotations

from torch.distributed import HashStore, PrefixStore, TCPStore

from opensmd.collectives.stores.address import where


def test_a_store_is_named_by_its_address() -> None:
    server = TCPStore("127.0.0.1", 0, 1, True)
    named = f"the store at 127.0.0.1:{server.port}"
    assert where(server) == where(PrefixStore("a", PrefixStore("b", server))) == named
    assert where(PrefixStore("a", HashStore())) == "the store"

"""A store in which nothing counts that a stranger wrote."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from opensmd.environment.job_secret import JobSecret, SecretError
from opensmd.launch.stores.sealed_store import SealedStore

OURS, THEIRS = JobSecret(b"known to the job's hosts"), JobSecret(b"a guess of a stranger")


def test_agents_believe_nothing_in_their_store_that_a_stranger_wrote() -> None:
    shared = dist.HashStore()
    agent, other = SealedStore(shared, OURS), SealedStore(shared, OURS)
    agent.multi_set(["a", "b"], ["1", b"2"])
    assert other.multi_get(["a", "b"]) == [b"1", b"2"]
    assert other.get("a") == b"1" and other.check(["a"]) and other.add("arrived", 1) == 1
    shared.set("a", "3")
    with pytest.raises(SecretError, match=r"a message \(a\) bears no code"):
        other.get("a")
    shared.set("a", shared.get("b"))  # one value in another's place
    with pytest.raises(SecretError):
        other.get("a")

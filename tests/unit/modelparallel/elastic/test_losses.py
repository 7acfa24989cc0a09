"""Errors that may come from the loss of a replica."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError, DistStoreError

from opensmd.modelparallel.elastic.losses import may_be_a_loss
from opensmd.modelparallel.exceptions import PeerFailed, SMPError


@pytest.mark.parametrize(
    "error",
    [
        DistBackendError("rank 3 has died"),
        DistStoreError("timeout"),
        PeerFailed("rank 1 failed"),
        RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4"),
    ],
)
def test_errors_of_communication_may_be_a_loss_also_as_the_cause_of_others(error: Exception) -> None:
    assert may_be_a_loss(error)
    wrapped = SMPError("the pipeline stopped")
    wrapped.__cause__ = error
    assert may_be_a_loss(wrapped)


def test_a_mistake_of_the_script_is_none_though_it_happens_while_another_error_is_handled() -> None:
    mistake = ValueError("the batch is empty")
    mistake.__context__ = DistBackendError("rank 3 has died")
    assert not may_be_a_loss(mistake)
    assert not may_be_a_loss(SMPError("an earlier step failed"))

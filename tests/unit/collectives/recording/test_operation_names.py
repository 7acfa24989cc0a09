"""How calls are named that others than the core have named first."""

from __future__ import annotations

import pytest

from opensmd.collectives.recording.operation_names import name_of


@pytest.mark.parametrize(
    ("logged", "usual"),
    [
        ("smddp:all_reduce", "all_reduce"),
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::_allgather_base_", "all_gather_into_tensor"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter_tensor"),
        ("c10d::alltoall_base_", "all_to_all_single"),
        ("c10d::barrier", "barrier"),
        ("ALLREDUCE", "all_reduce"),
        ("_ALLGATHER_BASE", "all_gather_into_tensor"),
        ("SEND", "send"),
        ("smddp:recvAnySource", "recv_any_source"),
    ],
)
def test_a_call_has_the_name_that_torch_distributed_gives_it(logged: str, usual: str) -> None:
    assert name_of(logged) == usual

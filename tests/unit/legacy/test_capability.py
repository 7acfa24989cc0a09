"""Which tensors a backend takes, and what is said of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opensmd.legacy.capability import check_tensors


def test_nccl_refuses_cpu_tensors_and_names_who_takes_them() -> None:
    for function in ("send", "all_reduce", "gather"):
        with pytest.raises(
            RuntimeError, match=f"DataChannelNccl does not support {function} of cpu tensors.*tcp, gloo, mpi"
        ):
            check_tensors("nccl", function, [torch.zeros(1)])
        for backend in ("tcp", "gloo", "mpi"):
            check_tensors(backend, function, [torch.zeros(1)])


def test_what_is_no_tensor_is_refused_by_name() -> None:
    not_a_tensor: Any = 1
    with pytest.raises(TypeError, match=r"all_reduce: expected a torch\.Tensor, got 1"):
        check_tensors("tcp", "all_reduce", [not_a_tensor])

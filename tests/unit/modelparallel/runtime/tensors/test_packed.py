"""Small tensors have the same numbers and the same form again after they were bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.runtime.tensors.packed import can_be_packed, pack, unpack

TABLE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        TABLE,
        TABLE.T[1:3, ::2],
        TABLE[:, :1].expand(4, 5),
        TABLE > 3,
        TABLE.to(torch.bfloat16)[1],
        torch.tensor(3),
        torch.ones(0, 3),
        torch.complex(TABLE, TABLE),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}",
)
def test_a_packed_tensor_is_the_same_again(tensor: Tensor) -> None:
    assert can_be_packed(tensor, 1024)
    made = unpack(pack(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    assert torch.equal(made, tensor) and made.stride() == tensor.stride() and made.dtype == tensor.dtype


def test_what_is_large_or_trains_or_has_another_layout_is_not_packed() -> None:
    others = (TABLE.to_sparse(), nn.Parameter(TABLE, requires_grad=False), torch.complex(TABLE, TABLE).conj())
    assert not any(can_be_packed(each, 1024) for each in (*others, TABLE.clone().requires_grad_()))
    assert can_be_packed(TABLE, 96) and not can_be_packed(TABLE, 95)
    assert can_be_packed(TABLE[:1].expand(1000, 6), 24)

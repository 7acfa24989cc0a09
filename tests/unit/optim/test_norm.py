"""The norm of all gradients together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from opensmd.optim.norm import global_norm

SHAPES = [(3, 4), (4,), (2, 2, 2)]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]
    return [*made, nn.Parameter(torch.zeros(3, dtype=torch.float64))]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters()]


def test_the_global_norm_is_that_of_all_gradients_as_one_vector() -> None:
    grads = [torch.full((1000,), 300.0, dtype=torch.bfloat16), torch.full((3,), 1e-3), *gradients(0)]
    wanted = torch.cat([grad.double().flatten() for grad in grads]).norm()
    found = global_norm(grads)
    assert found.dtype == torch.float64 and found.shape == ()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-7)
    assert global_norm([torch.full((4,), 3e4, dtype=torch.float16)]).item() == pytest.approx(6e4, rel=1e-3)
    assert global_norm([]).item() == 0.0

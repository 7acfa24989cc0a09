"""The norm of all gradients together."""

from __future__ import annotations

import pytest
import torch

from opensmd.optim.norm import global_norm
from tests.unit.optim.parameters import gradients


def test_the_global_norm_is_that_of_all_gradients_as_one_vector() -> None:
    grads = [torch.full((1000,), 300.0, dtype=torch.bfloat16), torch.full((3,), 1e-3), *gradients(0)]
    wanted = torch.cat([grad.double().flatten() for grad in grads]).norm()
    found = global_norm(grads)
    assert found.dtype == torch.float64 and found.shape == ()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-7)
    assert global_norm([torch.full((4,), 3e4, dtype=torch.float16)]).item() == pytest.approx(6e4, rel=1e-3)
    assert global_norm([]).item() == 0.0

"""Checkpointed modules compute their forward twice, and the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opensmd.modelparallel.activation_checkpointing import (
    checkpoint,
    checkpoint_sequential,
    set_activation_checkpointing,
)


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2"])
def test_checkpointed_modules_give_the_same_gradients_and_run_twice(strategy: str) -> None:
    torch.manual_seed(0)
    calls = 0

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x).tanh()

    model = nn.Sequential(*[Counted(3, 3) for _ in range(3)])
    x = torch.randn(2, 3)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]

    def gradients(run: Any) -> list[Any]:
        model.zero_grad()
        run().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    runs = [lambda: checkpoint_sequential(model, x, strategy), lambda: checkpoint(model, x)]
    for run in runs:
        calls = 0
        assert all(torch.equal(*pair) for pair in zip(gradients(run), expected, strict=True))
        assert calls == 6, "three in forward and again in backward"
    set_activation_checkpointing(model, strategy=strategy)
    assert all(torch.equal(*pair) for pair in zip(gradients(lambda: model(x)), expected, strict=True))
    block = nn.Linear(3, 3)
    set_activation_checkpointing(block)
    assert torch.equal(block(x), nn.functional.linear(x, block.weight, block.bias))
    with pytest.warns(UserWarning, match="of its own; this Linear is checkpointed whole"):
        set_activation_checkpointing(block, strategy=strategy, pack_args_as_tuple=True)
    with pytest.raises(ValueError, match="expected 'each', 'contiguous' or 'group_N'"):
        set_activation_checkpointing(model, strategy="some")

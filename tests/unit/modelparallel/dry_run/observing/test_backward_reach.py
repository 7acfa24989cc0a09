"""Only what a loss depends on has a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.dry_run.observing.backward_reach import BackwardReach


class Net(nn.Module):
    """Leaves out the result of its second layer."""

    def __init__(self, *, convolutions: bool) -> None:
        super().__init__()
        make = (lambda: nn.Conv1d(4, 4, 3, padding=1)) if convolutions else (lambda: nn.Linear(8, 8))
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        hidden = first(x)
        second(hidden)
        out: Tensor = third(hidden)
        return out


def returning(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(2, 4, 8)).sum()
    return loss


def going_backward(model: nn.Module) -> None:
    returning(model).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("step", [returning, going_backward])
@pytest.mark.parametrize("timed", [False, True])
def test_a_layer_whose_result_is_left_out_has_no_backward(
    step: Callable[[nn.Module], Any], timed: bool
) -> None:
    model = Net(convolutions=timed)
    trace = capture(model, lambda: step(model), operations=timed)
    assert trace.measured is timed
    backward = {unit.module: unit.backward_seconds for unit in trace.units}
    assert backward.pop("layers.1") == 0.0
    # of operations that are so small, nothing may be left of what was measured
    assert any(backward.values()) if timed else all(backward.values())
    assert timed or all(unit.forward_seconds for unit in trace.units)


def test_everything_has_a_backward_if_no_loss_is_known() -> None:
    model = Net(convolutions=False)
    trace = capture(model, lambda: model(torch.ones(2, 4, 8)))
    assert all(unit.backward_seconds for unit in trace.units)


def test_operations_that_write_in_place_or_into_a_part_have_a_backward() -> None:
    reach, numbers = BackwardReach(), []
    value = torch.ones(4, requires_grad=True)

    def noted(result: Tensor) -> Tensor:
        numbers.append(reach.operation())
        return result

    whole = noted(value * 2)
    noted(whole[:2].mul_(3))
    noted(whole.sigmoid_())
    left_out = noted(whole.exp())
    noted(left_out.exp())
    loss = noted(whole.sum())
    reach.losses([loss])
    assert [reach.has(number) for number in numbers] == [True, True, True, False, False, True]

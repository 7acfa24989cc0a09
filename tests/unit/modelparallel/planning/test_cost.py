"""Costs of operations come from shapes alone, with rates of the device they run on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from opensmd.modelparallel.planning.cost import CUDA, OperationCost, accumulation_seconds, cost_of

aten = torch.ops.aten


def batch_norm(data: Tensor) -> OperationCost:
    channels = [torch.ones(data.shape[1], device=data.device) for _ in range(4)]
    args = (data, *channels, True, 0.1, 1e-5)
    return cost_of(aten.native_batch_norm.default, args, {}, (data, data, data), needs_gradient=True)


def test_fake_and_real_tensors_of_one_shape_cost_the_same() -> None:
    with FakeTensorMode():
        fake = batch_norm(torch.ones(8, 16, 9, 9))
    assert fake == batch_norm(torch.ones(8, 16, 9, 9))


def test_a_gpu_has_one_rate_for_memory_whatever_the_kind() -> None:
    with FakeTensorMode():
        data = torch.ones(64, 256, 64, 64, device="cuda")
        relu = cost_of(aten.relu.default, (data,), {}, data, needs_gradient=False)
        tanh = cost_of(aten.tanh.default, (data,), {}, data, needs_gradient=False)
    assert relu == tanh
    assert relu.forward_seconds == pytest.approx(CUDA.seconds(0.0, 2 * 4 * data.numel()))


@pytest.mark.parametrize("operation", [aten.view.default, aten._unsafe_view.default, aten.detach.default])
def test_what_moves_no_data_costs_nothing(operation: torch._ops.OpOverload) -> None:
    data = torch.ones(8, 8)
    assert cost_of(operation, (data,), {}, data, needs_gradient=True) == OperationCost()


def test_without_a_gradient_there_is_no_backward() -> None:
    data = torch.ones(8, 8)
    assert cost_of(aten.relu.default, (data,), {}, data, needs_gradient=False).backward_seconds == 0.0


def test_adding_up_gradients_takes_time_by_their_size() -> None:
    cpu = torch.device("cpu")
    assert accumulation_seconds(200_000_000, cpu) == pytest.approx(
        2 * accumulation_seconds(100_000_000, cpu), rel=0.01
    )

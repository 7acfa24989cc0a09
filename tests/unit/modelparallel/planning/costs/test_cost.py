"""Costs of operations come from shapes alone, with rates of the device they run on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from opensmd.modelparallel.planning.costs import gpu
from opensmd.modelparallel.planning.costs.cost import OperationCost, accumulation_seconds, cost_of

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
    assert relu.forward_seconds == pytest.approx(2 * 4 * data.numel() / gpu.MEMORY)


def test_small_operations_on_a_gpu_take_the_time_to_start_them() -> None:
    with FakeTensorMode():
        data = torch.ones(8, device="cuda")
        relu = cost_of(aten.relu.default, (data,), {}, data, needs_gradient=False)
    assert relu.forward_seconds == gpu.START


def test_products_on_a_gpu_depend_on_the_precision() -> None:
    def product(dtype: torch.dtype) -> float:
        with FakeTensorMode():
            data = torch.ones(4096, 4096, device="cuda", dtype=dtype)
            return cost_of(aten.mm.default, (data, data), {}, data, needs_gradient=False).forward_seconds

    flops = 2 * 4096**3
    assert product(torch.bfloat16) == pytest.approx(flops / gpu.PRODUCTS)
    assert product(torch.float32) == pytest.approx(flops / gpu.FULL_PRODUCTS)
    torch.set_float32_matmul_precision("high")
    try:
        assert product(torch.float32) == product(torch.bfloat16) < product(torch.float64)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("operation", [aten.detach.default, aten.empty_like.default])
def test_what_computes_nothing_and_has_no_backward_costs_nothing(operation: torch._ops.OpOverload) -> None:
    data = torch.ones(8, 8)
    assert cost_of(operation, (data,), {}, data, needs_gradient=True) == OperationCost()


@pytest.mark.parametrize("operation", [aten.view.default, aten._unsafe_view.default])
def test_what_moves_no_data_costs_a_node_of_the_graph_whatever_its_size(
    operation: torch._ops.OpOverload,
) -> None:
    costs = [
        cost_of(operation, (data,), {}, data, needs_gradient=True)
        for data in (torch.ones(8, 8), torch.empty(1 << 20, 64, device="meta"))
    ]
    assert costs[0] == costs[1]
    assert 0 < costs[0].forward_seconds < costs[0].backward_seconds < 5e-6


def test_the_gradients_of_parts_are_put_into_those_of_the_whole() -> None:
    whole = torch.empty(1 << 10, 1 << 10, device="meta")
    shape, part, parts = (
        cost_of(operation, args, {}, out, needs_gradient=True)
        for operation, args, out in (
            (aten.view.default, (whole, [-1]), whole.view(-1)),
            (aten.slice.Tensor, (whole, 0, 0, 8), whole[:8]),
            (aten.split.Tensor, (whole, 256), whole.split(256)),
        )
    )
    assert part.backward_seconds > 10 * shape.backward_seconds  # all of the whole is cleared
    assert parts.backward_seconds > 1.5 * part.backward_seconds  # and here read and written
    assert part.forward_seconds == shape.forward_seconds
    frozen = cost_of(aten.slice.Tensor, (whole, 0, 0, 8), {}, whole[:8], needs_gradient=False)
    assert frozen.backward_seconds == 0.0
    small, large = torch.empty(1, 64, device="meta"), torch.empty(1 << 12, 64, device="meta")
    repeated = cost_of(aten.expand.default, (small, [1 << 12, 64]), {}, large, needs_gradient=True)
    assert repeated.backward_seconds > 10 * shape.backward_seconds  # a sum


def test_views_on_a_gpu_cost_nothing() -> None:
    with FakeTensorMode():
        data, part = torch.ones(64, 64, device="cuda"), torch.ones(8, 64, device="cuda")
    assert cost_of(aten.slice.Tensor, (data,), {}, part, needs_gradient=True) == OperationCost()


def test_without_a_gradient_there_is_no_backward() -> None:
    data = torch.ones(8, 8)
    assert cost_of(aten.relu.default, (data,), {}, data, needs_gradient=False).backward_seconds == 0.0


def test_adding_up_gradients_takes_time_by_their_size() -> None:
    cpu = torch.device("cpu")
    assert accumulation_seconds(200_000_000, cpu) == pytest.approx(
        2 * accumulation_seconds(100_000_000, cpu), rel=0.01
    )


def test_a_sum_of_gradients_that_has_begun_takes_its_bytes_alone() -> None:
    cpu = torch.device("cpu")
    start = accumulation_seconds(0, cpu)
    assert start > 0 == accumulation_seconds(0, cpu, begun=True)
    assert accumulation_seconds(1 << 20, cpu) == pytest.approx(
        start + accumulation_seconds(1 << 20, cpu, begun=True)
    )

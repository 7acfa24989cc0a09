"""Operations of the same size differ by their kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.planning.costs.cost import cost_of
from opensmd.modelparallel.planning.costs.cpu.rates import MEMORY, PRODUCTS, RATES, VIEW

aten = torch.ops.aten


def tensor(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta").requires_grad_()


def seconds(operation: torch._ops.OpOverload, *args: Any, out: Any, **kwargs: Any) -> tuple[float, float]:
    """Forward and backward."""
    cost = cost_of(operation, args, kwargs, out, needs_gradient=True)
    return cost.forward_seconds, cost.backward_seconds


def test_a_function_of_elements_takes_what_its_kind_does_or_the_memory_it_moves() -> None:
    data = tensor(1 << 18)
    start = RATES["arithmetic"].start * 1e-6
    relu, _ = seconds(aten.relu.default, data, out=data)
    tanh, _ = seconds(aten.tanh.default, data, out=data)
    start_of_tanh = RATES["tangent"].start * 1e-6
    assert relu - start == pytest.approx(2 * 4 * data.numel() / MEMORY.cached)
    assert tanh - start_of_tanh == pytest.approx(RATES["tangent"].forward * 1e-9 * data.numel())


def test_every_operation_takes_time_to_begin_backward_only_with_a_gradient() -> None:
    nothing = torch.empty(0, device="meta")
    trained = cost_of(aten.relu.default, (nothing,), {}, nothing, needs_gradient=True)
    frozen = cost_of(aten.relu.default, (nothing,), {}, nothing, needs_gradient=False)
    start = RATES["arithmetic"].start * 1e-6
    assert trained.forward_seconds == frozen.forward_seconds == start
    assert trained.backward_seconds == RATES["arithmetic"].backward_start * 1e-6
    assert frozen.backward_seconds == 0.0


def test_what_is_larger_than_the_caches_takes_longer_for_each_byte() -> None:
    small, large = MEMORY.seconds(MEMORY.caches), MEMORY.seconds(2 * MEMORY.caches)
    assert large - small == pytest.approx(MEMORY.caches / MEMORY.beyond)
    assert large > 2 * small


def test_a_batch_norm_in_training_takes_longer_than_one_with_fixed_statistics() -> None:
    data, channels = tensor(8, 64, 32, 32), [tensor(64)] * 4
    training, backward = seconds(aten.native_batch_norm.default, data, *channels, True, 0.1, 1e-5, out=data)
    fixed, _ = seconds(aten.native_batch_norm.default, data, *channels, False, 0.1, 1e-5, out=data)
    assert training > 3 * fixed
    assert backward < training


def test_max_pooling_takes_time_for_each_element_of_its_windows() -> None:
    data, out = tensor(8, 64, 32, 32), tensor(8, 64, 30, 30)
    three, _ = seconds(aten.max_pool2d_with_indices.default, data, [3, 3], [1, 1], out=out)
    five, _ = seconds(aten.max_pool2d_with_indices.default, data, [5], [1], out=out)
    assert five / three == pytest.approx(25 / 9, rel=0.01)


def test_gelu_by_the_tangent_takes_longer() -> None:
    data = tensor(1 << 18)
    exact, _ = seconds(aten.gelu.default, data, out=data)
    tangent, _ = seconds(aten.gelu.default, data, out=data, approximate="tanh")
    assert tangent > 2 * exact


def test_copying_crosswise_takes_longer_than_copying() -> None:
    data = tensor(512, 512)
    along, _ = seconds(aten.clone.default, data, out=data)
    across, _ = seconds(aten.clone.default, data.t(), out=data)
    assert across > 3 * along


def test_an_embedding_reads_rows_and_clears_its_whole_table_backward() -> None:
    table, words = tensor(1 << 16, 64), torch.empty(8, dtype=torch.long, device="meta")
    forward, backward = seconds(aten.embedding.default, table, words, out=tensor(8, 64))
    assert forward < 1e-5
    assert backward > MEMORY.seconds(4 * table.numel())


def test_a_product_of_two_tensors_takes_longer_backward_than_a_sum() -> None:
    one, other = tensor(1 << 18), tensor(1 << 18)
    _, product = seconds(aten.mul.Tensor, one, other, out=one)
    _, total = seconds(aten.add.Tensor, one, other, out=one)
    assert product > 2 * total


@pytest.mark.parametrize(("rows", "width"), [(32, 16), (256, 512)])
def test_a_matrix_product_takes_twice_as_long_backward_as_forward(rows: int, width: int) -> None:
    data, weight = tensor(rows, width), tensor(width, width)
    forward, backward = seconds(aten.mm.default, data, weight, out=tensor(rows, width))
    starts = 1e-6 * PRODUCTS.start, 1e-6 * PRODUCTS.backward_start
    assert backward - starts[1] == pytest.approx(2 * (forward - starts[0]))


def test_narrow_matrices_are_multiplied_more_slowly() -> None:
    wide, _ = seconds(aten.mm.default, tensor(4096, 256), tensor(256, 256), out=tensor(4096, 256))
    narrow, _ = seconds(aten.mm.default, tensor(1 << 20, 16), tensor(16, 16), out=tensor(1 << 20, 16))
    assert narrow > 1.5 * wide


def test_layer_norm_takes_time_for_each_row() -> None:
    def norm(rows: int, width: int) -> float:
        data = tensor(rows, width)
        args = (data, [width], tensor(width), tensor(width), 1e-5)
        return seconds(aten.native_layer_norm.default, *args, out=data)[0]

    assert norm(1 << 14, 16) > 2 * norm(1 << 8, 1 << 10)


def test_copying_and_joining_hand_their_gradients_on() -> None:
    data = tensor(1 << 18)
    _, copied = seconds(aten.clone.default, data, out=data)
    _, joined = seconds(aten.cat.default, [data] * 8, out=tensor(1 << 21))
    assert copied == pytest.approx(VIEW.backward_start * 1e-6)
    assert joined == pytest.approx(8 * copied)


def test_a_softmax_that_looks_for_masked_rows_takes_longer() -> None:
    scores = tensor(1 << 10, 1 << 8)
    plain, _ = seconds(aten._softmax.default, scores, -1, False, out=scores)
    masked, _ = seconds(aten._safe_softmax.default, scores, -1, out=scores)
    assert masked > 2 * plain


def test_a_batch_norm_of_few_pixels_is_slow_backward() -> None:
    def norm(channels: int, side: int) -> float:
        data, each = tensor(8, channels, side, side), [tensor(channels)] * 4
        return seconds(aten.native_batch_norm.default, data, *each, True, 0.1, 1e-5, out=data)[1]

    assert norm(1024, 2) > 4 * norm(256, 4)  # of as many elements

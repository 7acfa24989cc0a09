"""Convolutions of as much arithmetic differ by their channels, kernels and images."""

from __future__ import annotations

import torch
from torch import Tensor

from opensmd.modelparallel.planning.costs.cost import OperationCost, cost_of


def convolution(
    *,
    inside: int,
    out: int,
    side: int,
    kernel: int = 1,
    groups: int = 1,
    data_wants: bool = True,
    channels_last: bool = False,
    dilation: int = 1,
) -> OperationCost:
    data = torch.empty(8, inside, side, side, device="meta").requires_grad_(data_wants)
    if channels_last:
        data = data.to(memory_format=torch.channels_last)
    weight = torch.empty(out, inside // groups, kernel, kernel, device="meta").requires_grad_()
    result = torch.empty(8, out, side, side, device="meta")
    middle = [dilation * (kernel // 2)] * 2
    args: tuple[Tensor | list[int] | bool | int | None, ...]
    args = (data, weight, None, [1, 1], middle, [dilation] * 2, False, [0, 0], groups)
    return cost_of(torch.ops.aten.convolution.default, args, {}, result, needs_gradient=True)


def rate(cost: OperationCost) -> float:
    return cost.flops / cost.forward_seconds


def test_few_channels_a_group_are_slower_and_one_or_two_slowest() -> None:
    whole, eight, two = (
        rate(convolution(inside=128, out=128, side=28, kernel=3, groups=groups)) for groups in (1, 16, 64)
    )
    assert whole > 1.5 * eight > 7 * two


def test_channels_are_filled_up_to_vectors() -> None:
    full, odd = (convolution(inside=each, out=each, side=28, kernel=3) for each in (32, 20))
    assert rate(odd) < 0.6 * rate(full)


def test_a_kernel_a_channel_is_bound_by_its_elements_and_slow_backward_unless_it_is_three_by_three() -> None:
    three, five = (convolution(inside=96, out=96, side=28, kernel=each, groups=96) for each in (3, 5))
    assert rate(three) < 30e9
    assert three.backward_seconds < 3 * three.forward_seconds
    assert five.backward_seconds > 2 * three.backward_seconds


def test_images_of_a_few_pixels_take_as_long_as_larger_ones_but_not_where_all_are_one_matrix() -> None:
    few, more = (convolution(inside=256, out=256, side=side) for side in (2, 6))
    assert few.forward_seconds > 0.8 * more.forward_seconds
    last = convolution(inside=256, out=256, side=2, channels_last=True)
    assert last.forward_seconds < 0.5 * few.forward_seconds


def test_pictures_need_no_gradient() -> None:
    first, later = (
        convolution(inside=3, out=64, side=32, kernel=3, data_wants=wants) for wants in (False, True)
    )
    assert first.forward_seconds == later.forward_seconds
    assert first.backward_seconds < 0.7 * later.backward_seconds


def test_a_kernel_a_channel_is_slow_backward_on_the_smallest_images_and_with_gaps() -> None:
    def backward(side: int, dilation: int = 1) -> float:
        cost = convolution(
            inside=1024 // side**2,
            out=1024 // side**2,
            side=side,
            kernel=3,
            groups=1024 // side**2,
            dilation=dilation,
        )
        return cost.backward_seconds

    assert backward(2) > 1.5 * backward(4)  # of as many elements
    assert backward(8, dilation=2) > 1.2 * backward(8)


def test_a_number_a_channel_and_kernels_that_reach_beyond_images_are_products_for_each_channel() -> None:
    one, three, beyond = (
        convolution(inside=384, out=384, side=2, kernel=kernel, groups=384) for kernel in (1, 3, 7)
    )
    assert one.forward_seconds > 3 * three.forward_seconds
    assert beyond.forward_seconds == one.forward_seconds


def test_large_kernels_are_quicker_backward_where_the_channels_of_a_pixel_lie_side_by_side() -> None:
    planes, rows = (
        convolution(inside=96, out=96, side=16, kernel=7, groups=96, channels_last=last)
        for last in (False, True)
    )
    assert rows.backward_seconds < 0.6 * planes.backward_seconds

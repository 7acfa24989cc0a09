"""The time of convolutions on one core: three families that differ tenfold, and the cost of small images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from opensmd.modelparallel.planning.costs.cpu.rates import CONVOLUTIONS as RATES
from opensmd.modelparallel.planning.costs.cpu.rates import MEMORY

__all__ = ["convolution_seconds"]

VECTOR = 16  # channels, or pixels, that are computed together


class _Shape(NamedTuple):
    """Sizes of a convolution: ``pixels`` of an image, ``elements`` and ``bytes`` of data and result."""

    flops: float
    pixels: int
    channels: tuple[int, int]  # per group: in, out
    groups: int
    taps: int  # per kernel
    dilated: bool
    outside: bool  # whether kernels reach further beyond an image than its size
    elements_in: int
    elements: int
    bytes: float
    weight_bytes: float
    rows: bool  # whether a pixel's channels are adjacent


def convolution_seconds(args: Sequence[Any], result: Tensor, needs_gradient: bool) -> tuple[float, float]:
    """Return forward and backward seconds of ``aten.convolution`` with ``args``."""
    data, weight = args[0], args[1]
    shape = _shape(args, result)
    of_data = needs_gradient and data.requires_grad
    of_weight = needs_gradient and weight.requires_grad
    if shape.taps == 1 and shape.groups == 1 and shape.pixels * data.shape[0] == _places(data):
        return _of_single_pixels(shape, of_data, of_weight)
    if shape.channels[0] == 1 and shape.groups > 1 and shape.channels[1] == 1:
        return _of_single_channels(shape, of_data or of_weight)
    return _of_groups(shape, of_data, of_weight)


def _shape(args: Sequence[Any], result: Tensor) -> _Shape:
    data, weight, padding, dilation = args[0], args[1], args[4], args[5]
    transposed, groups = args[6], args[8]
    small, kernel = (data if transposed else result), weight.shape[2:]
    channels = (weight.shape[0] // groups, weight.shape[1])
    return _Shape(
        flops=2.0 * _places(small) * weight.numel(),
        pixels=math.prod(small.shape[2:]),
        channels=channels if transposed else (channels[1], channels[0]),
        groups=groups,
        taps=math.prod(kernel),
        dilated=any(step > 1 for step in dilation),
        outside=any(beyond > side for beyond, side in zip(padding, data.shape[2:], strict=False)),
        elements_in=data.numel(),
        elements=result.numel(),
        bytes=data.numel() * data.element_size() + result.numel() * result.element_size(),
        weight_bytes=weight.numel() * weight.element_size(),
        rows=data.dim() == 4 and not data.is_contiguous() and data.stride(1) == 1,
    )


def _of_single_pixels(shape: _Shape, of_data: bool, of_weight: bool) -> tuple[float, float]:
    """Return the time for kernels of one pixel, which are matrix products over the pixels of one image."""
    short = min(shape.channels)
    rate = RATES.pixel_flops * short / (short + RATES.pixel_half)
    seconds = shape.flops / rate
    order = shape.weight_bytes / RATES.weights
    large = max(0.0, shape.weight_bytes - RATES.large) / RATES.large_gradients
    start = RATES.pixel_start * 1e-6
    like_forward = max(seconds * _filled(shape) / shape.pixels, MEMORY.seconds(shape.bytes)) + order
    if shape.pixels == 1:  # a matrix product, as in a Linear layer
        rest, large = 1.0, 0.0
    else:
        rest = 1 + RATES.last / 2 / shape.pixels
    of_weights = RATES.weight_gradient * seconds * rest + 2 * order + large
    backward = of_data * like_forward + of_weight * of_weights + 2 * start
    return like_forward + start, backward


def _filled(shape: _Shape) -> int:
    """Return how many pixels are actually computed, including padding, unless all images are one matrix."""
    pixels = shape.pixels
    if pixels == 1 or shape.rows:
        return pixels
    if pixels < RATES.register:
        return RATES.fewer
    return pixels + (RATES.last if pixels % RATES.register else 0)


def _of_single_channels(shape: _Shape, wanted: bool) -> tuple[float, float]:
    """Return the time of depthwise kernels; backward, only 3 x 3 is fast, except on the smallest images."""
    channels, start = shape.groups * 1e-6, RATES.start * 1e-6
    if shape.taps == 1 or shape.outside:  # one product per channel
        return start + RATES.lone_channel * channels, wanted * (start + 2 * RATES.lone_channel * channels)
    elements = 1e-9 * (shape.elements + shape.elements_in) / 2
    memory = MEMORY.seconds(2 * shape.bytes)
    each = RATES.depthwise + RATES.depthwise_tap * shape.taps
    forward = max(each * elements, memory) + start + 0.08 * channels
    if not wanted:
        return forward, 0.0
    if shape.taps == 9 and not shape.dilated and shape.pixels > RATES.smallest:
        backward = max(RATES.depthwise_backward * elements, 2 * memory) + RATES.channel * channels
    else:
        tap = RATES.slow_tap_of_rows if shape.rows else RATES.slow_tap
        backward = (1 + shape.dilated) * (tap * shape.taps * elements + RATES.slow_channel * channels)
    return forward, backward + 2 * start


def _of_groups(shape: _Shape, of_data: bool, of_weight: bool) -> tuple[float, float]:
    """Return the time of all others: channels fill vectors, and data and weights are reordered first."""
    product, data = shape.flops / _rate(shape), shape.bytes / RATES.data
    large = max(0.0, shape.weight_bytes - RATES.large) / RATES.large_weights
    order = shape.weight_bytes / RATES.weights + large
    start = RATES.start * 1e-6
    backward = (of_data + of_weight) * (product + 1.6 * data + 2 * order) + 1.8 * start
    return product + data + order + start, backward


def _rate(shape: _Shape) -> float:
    inside, out = shape.channels
    if shape.groups == 1 and inside <= 4:
        return RATES.flops
    if shape.groups == 1:
        return RATES.flops * inside * out / (_vectors(inside) * _vectors(out))
    few = min(inside, out)
    if few <= 2:
        return RATES.unordered_flops
    return RATES.flops * few / (few + RATES.group_half)


def _vectors(channels: int) -> int:
    return -(-channels // VECTOR) * VECTOR


def _places(images: Tensor) -> int:
    """Return the number of pixels of all images."""
    return images.shape[0] * math.prod(images.shape[2:])

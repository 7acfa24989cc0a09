"""The table of rates: the time of each kind of operation on one CPU core.

``python -m benchmarks.partition.operations`` measures every kind and prints it next to the values here.
Numbers are rounded: other cores are faster or slower at everything, and only ratios matter for a cut.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ACCUMULATION",
    "CONVOLUTIONS",
    "MEMORY",
    "PRODUCTS",
    "RATES",
    "VIEW",
    "Convolutions",
    "MemoryRates",
    "Products",
    "Rate",
]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A kind of operation whose time is proportional to its elements.

    Attributes:
        forward, backward: nanoseconds per element of 4 bytes.
        row: nanoseconds per normalized row, forward; half of it backward.
        start, backward_start: microseconds for any size. Forward includes Python's overhead.
    """

    forward: float = 0.0
    backward: float = 0.0
    row: float = 0.0
    start: float = 4.0
    backward_start: float = 3.0


# For operations limited by memory, see MemoryRates. What counts as elements depends on the kind.
RATES = {
    # of the larger of input and result
    "arithmetic": Rate(start=3.5, backward_start=9),
    "exponential": Rate(
        forward=0.36, backward=0.7, start=9, backward_start=20
    ),  # exp, log, sigmoid, SiLU, GELU
    "tangent": Rate(forward=1.1, backward=0.4, start=5, backward_start=10),  # tanh, sine, softplus, ELU
    "GELU by tangent": Rate(forward=1.1, backward=1.2),
    "mish": Rate(forward=3.0, backward=3.5),
    "random": Rate(forward=6.0, backward=0.5),  # dropout
    "mask": Rate(forward=0.9, backward=0.6, backward_start=8),
    "transposed copy": Rate(forward=0.7, backward=1.0),
    "moved copy": Rate(forward=0.3, backward=0.21, start=14, backward_start=20),  # pad, roll
    "softmax": Rate(forward=0.5, backward=0.3, start=10, backward_start=12),
    "softmax of masked rows": Rate(forward=1.7, backward=0.3, start=10, backward_start=12),
    "layer norm": Rate(forward=0.33, backward=0.58, row=15, start=10, backward_start=16),
    "group norm": Rate(forward=0.22, backward=0.58, start=8, backward_start=19),
    "batch norm": Rate(forward=1.3, backward=0.6, start=9, backward_start=17),  # in training
    "batch norm of few pixels": Rate(forward=1.6, backward=8.3, start=13, backward_start=15),
    "fixed batch norm": Rate(forward=0.3, backward=0.9, start=22, backward_start=20),
    "mean": Rate(forward=0.12, backward=0.35, start=27, backward_start=20),
    "extreme": Rate(forward=2.0, backward=0.8, start=14, backward_start=18),  # maxima and norms of rows
    "variance": Rate(forward=9.0, backward=0.8, start=4, backward_start=13),
    "running sum": Rate(forward=0.95, backward=2.0, start=10),
    "sort": Rate(forward=40.0, backward=1.5),
    "largest of a row": Rate(forward=6.0, backward=0.5),
    # of the result
    "rows of a table": Rate(forward=0.3, backward=0.6),  # embeddings; backward also clears the whole table
    "index": Rate(forward=1.3, backward=1.6, start=18, backward_start=22),
    "gather": Rate(forward=0.65, backward=0.85),
    "nearest pixels": Rate(forward=1.9, backward=0.75, start=5, backward_start=12),
    "mixed pixels": Rate(forward=1.5, backward=4.2, start=15, backward_start=8),
    "cubic pixels": Rate(forward=8.5, backward=21.0),
    # of all windows together
    "maximum of windows": Rate(forward=2.4, backward=0.3, start=19, backward_start=16),
    "mean of windows": Rate(forward=0.7, backward=0.7, start=40, backward_start=80),
}


# Nothing is moved; backward is just a graph node. For gradients that are joined or added, see views.py.
VIEW = Rate(start=0.5, backward_start=1.7)


@dataclass(frozen=True, kw_only=True)
class MemoryRates:
    """Bytes per second within the caches, and beyond them in pages that are new to the process."""

    cached: float
    caches: float
    beyond: float

    def seconds(self, size: float) -> float:
        """Return the time to read and write ``size`` bytes."""
        return min(size, self.caches) / self.cached + max(0.0, size - self.caches) / self.beyond


MEMORY = MemoryRates(cached=62e9, caches=15 << 20, beyond=32e9)
# adding gradients to existing ones: bytes per second, and seconds to start
ACCUMULATION = (68e9, 8e-6)


@dataclass(frozen=True, kw_only=True)
class Products:
    """Matrix products: ``flops`` per second of large ones; half as many if a side is ``half`` long.

    Reading ``factors`` bytes per second of the operands is a second limit. ``start`` is in microseconds.
    """

    flops: float
    half: float
    factors: float
    start: float
    backward_start: float
    attention_flops: float
    attention_start: float


PRODUCTS = Products(
    flops=115e9,
    half=12,
    factors=8.3e9,
    start=7,
    backward_start=20,
    attention_flops=80e9,
    attention_start=40,
)


@dataclass(frozen=True, kw_only=True)
class Convolutions:
    """Convolutions, which reorder their data and back, unless kernels are single pixels.

    Attributes:
        flops: per second, for kernels of several pixels; channels are padded to multiples of 16.
        unordered_flops: for groups of one or two channels, except with as many groups as channels.
        group_half: with so many channels per group, half of ``flops``.
        start: microseconds to begin one.
        data, weights: bytes per second of reordering them, in each product.
        large, large_weights: bytes of weights, and bytes per second for an extra cost of what exceeds them.
        large_gradients: the same for the gradients of single pixels' weights.
        pixel_flops, pixel_half: ``flops`` of single pixels; half as many with so many channels.
        pixel_start: microseconds to start one of those.
        register, fewer, last: pixels of an image that are computed together; images with fewer (but several)
            take as long as this many, and a remainder as long as so many more.
        weight_gradient: for single pixels, how much longer it takes than the forward product.
        depthwise, depthwise_tap: nanoseconds per element of data or result, and extra ones per kernel weight.
        depthwise_backward, channel: nanoseconds per element and microseconds per channel, for 3 x 3 backward.
        smallest: images of at most so many pixels take as long backward as with other kernels.
        slow_tap, slow_tap_of_rows, slow_channel: for other kernels backward, nanoseconds per element and
            kernel weight, the same if a pixel's channels are adjacent, and microseconds per channel.
        lone_channel: microseconds per channel of 1 x 1, each a product of its own; twice that backward.
    """

    flops: float
    unordered_flops: float
    group_half: float
    start: float
    data: float
    weights: float
    large: float
    large_weights: float
    large_gradients: float
    pixel_flops: float
    pixel_half: float
    pixel_start: float
    register: int
    fewer: int
    last: int
    weight_gradient: float
    depthwise: float
    depthwise_tap: float
    depthwise_backward: float
    channel: float
    smallest: int
    slow_tap: float
    slow_tap_of_rows: float
    slow_channel: float
    lone_channel: float


CONVOLUTIONS = Convolutions(
    flops=265e9,
    unordered_flops=2.7e9,
    group_half=6,
    start=80,
    data=9.2e9,
    weights=13.5e9,
    large=2 << 20,
    large_weights=10.5e9,
    large_gradients=0.25e9,
    pixel_flops=112e9,
    pixel_half=14,
    pixel_start=12,
    register=16,
    fewer=37,
    last=6,
    weight_gradient=0.96,
    depthwise=0.63,
    depthwise_tap=0.008,
    depthwise_backward=1.35,
    channel=0.03,
    smallest=4,
    slow_tap=0.58,
    slow_tap_of_rows=0.2,
    slow_channel=1.05,
    lone_channel=2.5,
)

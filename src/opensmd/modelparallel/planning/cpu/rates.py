"""What operations of each kind take on one CPU core: the table, and nothing else.

``python -m benchmarks.partition.operations`` measures every kind and prints it next to what is written here.
Numbers are rounded: other cores are faster or slower at all of it, and only ratios matter for a cut.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ACCUMULATION",
    "CONVOLUTIONS",
    "MEMORY",
    "PRODUCTS",
    "RATES",
    "Convolutions",
    "MemoryRates",
    "Products",
    "Rate",
]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A kind of operation whose time is that of its elements.

    Attributes:
        forward, backward: nanoseconds an element of 4 bytes.
        row: nanoseconds for each row that is normalized, forward; half of it backward.
        start, backward_start: microseconds whatever the size. That of a forward has Python in it.
    """

    forward: float = 0.0
    backward: float = 0.0
    row: float = 0.0
    start: float = 4.0
    backward_start: float = 3.0


# Where memory is what an operation takes: see MemoryRates. Elements count as the kind says.
RATES = {
    # of the larger of input and result
    "arithmetic": Rate(),
    "exponential": Rate(forward=0.6, backward=0.8),  # exp, log, sigmoid, SiLU, GELU
    "tangent": Rate(forward=2.1, backward=0.6),  # tanh, sine, softplus, ELU
    "GELU by tangent": Rate(forward=1.8, backward=1.9),
    "mish": Rate(forward=3.9, backward=4.6),
    "random": Rate(forward=12.0, backward=0.5),  # dropout
    "mask": Rate(forward=0.9, backward=0.9),
    "transposed copy": Rate(forward=1.2, backward=1.0),
    "moved copy": Rate(forward=0.4, backward=0.4),  # pad, roll
    "softmax": Rate(forward=0.65, backward=0.45),
    "layer norm": Rate(forward=0.3, backward=0.5, row=25, start=9, backward_start=9),
    "group norm": Rate(forward=0.45, backward=0.65, start=12, backward_start=35),
    "batch norm": Rate(forward=2.0, backward=0.9, start=22, backward_start=20),  # in training
    "fixed batch norm": Rate(forward=0.3, backward=0.9, start=22, backward_start=20),
    "mean": Rate(forward=0.1, backward=0.45),
    "extreme": Rate(forward=0.1, backward=1.5),  # maxima and norms of rows
    "variance": Rate(forward=5.7, backward=0.7),
    "running sum": Rate(forward=0.95, backward=2.0),
    "sort": Rate(forward=40.0, backward=1.5),
    "largest of a row": Rate(forward=6.0, backward=0.5),
    # of the result
    "rows of a table": Rate(forward=0.2, backward=0.4),  # embeddings; backward clears the whole table, too
    "gather": Rate(forward=0.65, backward=0.85),
    "nearest pixels": Rate(forward=1.9, backward=0.8),
    "mixed pixels": Rate(forward=1.9, backward=3.8),
    "cubic pixels": Rate(forward=8.5, backward=21.0),
    # of all windows together
    "maximum of windows": Rate(forward=3.0, backward=0.2),
    "mean of windows": Rate(forward=1.0, backward=1.0),
}


@dataclass(frozen=True, kw_only=True)
class MemoryRates:
    """Bytes a second of what lies in caches, and of what is beyond them, in pages new to the process."""

    cached: float
    caches: float
    beyond: float

    def seconds(self, size: float) -> float:
        """The time to read and write ``size`` bytes."""
        return min(size, self.caches) / self.cached + max(0.0, size - self.caches) / self.beyond


MEMORY = MemoryRates(cached=50e9, caches=12 << 20, beyond=6e9)
# bytes a second of adding gradients to those that are there, and seconds to start
ACCUMULATION = (40e9, 3e-6)


@dataclass(frozen=True, kw_only=True)
class Products:
    """Matrix products: ``flops`` a second of large ones; half as many where a side is ``half`` long.

    ``factors`` bytes a second of what is multiplied are a second limit. ``start`` is in microseconds.
    """

    flops: float
    half: float
    factors: float
    start: float
    backward_start: float
    attention_flops: float
    attention_start: float


PRODUCTS = Products(
    flops=95e9,
    half=12,
    factors=13e9,
    start=7,
    backward_start=15,
    attention_flops=65e9,
    attention_start=40,
)


@dataclass(frozen=True, kw_only=True)
class Convolutions:
    """Convolutions. They bring data into another order and back, unless kernels are single pixels.

    Attributes:
        flops: a second, of kernels of several pixels; channels are filled up to multiples of 16.
        first_flops: of up to four channels, as in pictures, unless kernels do not overlap.
        unordered_flops: of groups of one or two channels, but as many groups as channels.
        group_half: at so many channels a group, half of ``flops``.
        start: microseconds to begin one.
        weights: bytes a second of bringing weights into order, in each product.
        large, large_gradients: bytes of weights, and bytes a second of the gradients of what is beyond.
        pixel_flops, pixel_half: of single pixels; at so many channels half as many.
        pixel_start: microseconds to begin one of those.
        register, fewer, last: pixels of an image that are computed together; images of fewer (but of several)
            take as long as this many, and a rest as long as so many more.
        weight_gradient: of single pixels: how much longer than a product forward.
        depthwise, depthwise_tap: nanoseconds an element of the result, and more a weight of its kernel.
        slow_tap: backward of other kernels than 3 x 3, for each weight of the kernel.
        small_image: microseconds a channel, backward, where images are smaller than kernels.
    """

    flops: float
    first_flops: float
    unordered_flops: float
    group_half: float
    start: float
    weights: float
    large: float
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
    slow_tap: float
    small_image: float


CONVOLUTIONS = Convolutions(
    flops=115e9,
    first_flops=55e9,
    unordered_flops=5e9,
    group_half=8,
    start=52,
    weights=7e9,
    large=2 << 20,
    large_gradients=0.5e9,
    pixel_flops=95e9,
    pixel_half=16,
    pixel_start=8,
    register=16,
    fewer=48,
    last=12,
    weight_gradient=1.2,
    depthwise=0.7,
    depthwise_tap=0.022,
    slow_tap=0.87,
    small_image=1.6,
)

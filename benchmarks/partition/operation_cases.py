"""Operations of every kind in the table of rates, in sizes that models have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CASES", "Case"]

Made = tuple[Callable[..., Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """An operation and its arguments, made anew."""

    name: str
    make: Callable[[], Made]


def _data(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _of(name: str, operation: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Case:
    return Case(name, lambda: (operation, [_data(*shape) for shape in shapes]))


def _module(name: str, make: Callable[[], nn.Module], *shape: int) -> Case:
    return Case(name, lambda: (make(), [_data(*shape)]))


def _convolution(
    inside: int, out: int, side: int, kernel: int = 1, *, groups: int = 1, last: bool = False
) -> Case:
    def make() -> Made:
        data = torch.randn(8, inside, side, side)
        if last:
            data = data.to(memory_format=torch.channels_last)
        module = nn.Conv2d(inside, out, kernel, padding=kernel // 2, groups=groups, bias=False)
        return module, [data.requires_grad_()]

    kind = "pixels" if kernel == 1 and groups == 1 else "depthwise" if groups == inside else "grouped"
    kind = "dense" if kind == "grouped" and groups == 1 else kind
    order = ", channels last" if last else ""
    return Case(f"convolution, {kind}: {inside} to {out}, {kernel} x {kernel}, {side} x {side}{order}", make)


def _words() -> Made:
    words = torch.randint(1000, (512,))
    return lambda table: F.embedding(words, table), [_data(1000, 256)]


def _indexed() -> Made:
    rows = torch.randint(1000, (512,))
    return lambda table: table[rows], [_data(1000, 256)]


def _gathered() -> Made:
    places = torch.randint(256, (512, 256))
    return lambda table: table.gather(1, places), [_data(512, 256)]


ELEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + x,
    "multiply": lambda x: x * x,
    "SiLU": F.silu,
    "GELU": F.gelu,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "mish": F.mish,
    "dropout": lambda x: F.dropout(x, 0.5),
    "copy": torch.clone,
}

CASES = (
    *(_of(f"{name}, {n >> 10} Ki", run, (n,)) for name, run in ELEMENTS.items() for n in (1 << 14, 1 << 19)),
    _of("add, 8 Mi", lambda x: x + x, (1 << 23,)),
    _of("transposed copy", lambda x: x.transpose(1, 2).contiguous(), (8, 128, 256)),
    _of("pad", lambda x: F.pad(x, (1, 1, 1, 1)), (8, 64, 16, 32)),
    _of("roll", lambda x: torch.roll(x, (1, 1), (1, 2)), (8, 32, 32, 64)),
    *(
        _of(f"softmax, {rows} x {width}", lambda x: F.softmax(x, -1), (rows, width))
        for rows, width in ((512, 64), (2048, 512))
    ),
    *(
        _module(f"layer norm, {rows} x {width}", lambda width=width: nn.LayerNorm(width), rows, width)  # type: ignore[misc]
        for rows, width in ((512, 64), (8192, 192), (512, 1024))
    ),
    _module("group norm", lambda: nn.GroupNorm(8, 64), 8, 64, 28, 28),
    *(
        _module(
            f"batch norm, {channels} x {side}",
            lambda channels=channels: nn.BatchNorm2d(channels),
            8,
            channels,
            side,
            side,
        )  # type: ignore[misc]
        for channels, side in ((16, 32), (64, 28), (256, 7))
    ),
    _module("batch norm, fixed", lambda: nn.BatchNorm2d(64).eval(), 8, 64, 28, 28),
    _of("mean", lambda x: x.mean((2, 3)), (8, 64, 28, 28)),
    _of("maximum", lambda x: x.amax(-1), (1024, 512)),
    _of("variance", lambda x: x.var(-1), (1024, 512)),
    _of("running sum", lambda x: x.cumsum(-1), (1024, 512)),
    _of("sort", lambda x: x.sort(-1)[0], (64, 512)),
    _of("largest of a row", lambda x: x.topk(4, -1)[0], (1024, 64)),
    Case("rows of a table: embedding", _words),
    Case("gather: index", _indexed),
    Case("gather", _gathered),
    _of("nearest pixels", lambda x: F.interpolate(x, scale_factor=2), (8, 64, 14, 14)),
    _of("mixed pixels", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (8, 64, 14, 14)),
    _of("cubic pixels", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (8, 64, 14, 14)),
    *(
        _of(f"maximum of windows, {k} x {k}", lambda x, k=k: F.max_pool2d(x, k, 1, k // 2), (8, 64, 14, 14))
        for k in (3, 5)
    ),
    _of("mean of windows", lambda x: F.avg_pool2d(x, 3, 1, 1), (8, 64, 14, 14)),
    *(
        _module(f"product: {rows} x {inside} x {out}", lambda i=inside, o=out: nn.Linear(i, o), rows, inside)  # type: ignore[misc]
        for rows, inside, out in (
            (96, 32, 64),
            (8, 512, 512),
            (128, 192, 768),
            (256, 512, 512),
            (4096, 64, 64),
        )
    ),
    _of("product: batches", torch.bmm, (96, 64, 32), (96, 32, 64)),
    *(
        _of(f"attention: {shape}", F.scaled_dot_product_attention, shape, shape, shape)
        for shape in ((8, 4, 16, 8), (4, 8, 128, 32))
    ),
    *(_convolution(c, c, side) for c in (16, 64, 256) for side in (2, 4, 7, 14)),
    _convolution(256, 256, 2, last=True),
    _convolution(32, 128, 28),
    *(_convolution(c, c, side, 3) for c in (20, 32, 128) for side in (4, 14)),
    _convolution(3, 32, 28, 3),
    *(_convolution(128, 128, 14, 3, groups=groups) for groups in (2, 8, 16)),
    *(_convolution(c, c, 14, kernel, groups=c) for c in (32, 256) for kernel in (3, 5)),
    _convolution(256, 256, 2, 3, groups=256),
)

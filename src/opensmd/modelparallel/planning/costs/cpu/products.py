"""The time of matrix products, attention and recurrent layers on one core."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from opensmd.modelparallel.planning.costs.cpu.rates import PRODUCTS

__all__ = ["attention_seconds", "product_seconds"]


def product_seconds(flops: float, factors: Sequence[Tensor], wanting: int) -> tuple[float, float]:
    """Return forward and backward seconds of a product; ``wanting`` of its ``factors`` get a gradient.

    A gradient is a product with the same amount of work. Products with a short side do not fill the core's
    registers.
    """
    short = min((min(factor.shape[-2:]) for factor in _matrices(factors)), default=1)
    rate = PRODUCTS.flops * short / (short + PRODUCTS.half)
    read = sum(factor.numel() * factor.element_size() for factor in factors)
    seconds = max(flops / rate, read / PRODUCTS.factors)
    return seconds + PRODUCTS.start * 1e-6, wanting * seconds + PRODUCTS.backward_start * 1e-6


def attention_seconds(flops: float) -> tuple[float, float]:
    """Return forward and backward seconds of fused attention, whose backward recomputes the scores."""
    seconds = flops / PRODUCTS.attention_flops
    start = PRODUCTS.attention_start * 1e-6
    return seconds + start, 2.4 * seconds + 3 * start


def _matrices(factors: Sequence[Tensor]) -> list[Tensor]:
    return [factor for factor in factors if factor.dim() > 1]

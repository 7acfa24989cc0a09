"""How far a shared training may be from that in one process; pure.

FP32: losses and norms within 1e-6, the first gradients within 1e-6 of each tensor's largest entry, and
parameters after all steps within 1e-5 of it. In 16 bits sums are rounded where ranks add them up, so the
yardstick is the type's own rounding (its epsilon).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.combinations.training import DTYPES, Trained

__all__ = ["Distance", "differences", "distance"]

# In 16 bits, roundings of a loss and of a tensor's largest entry; besides, of the model's largest gradient.
LOSS, TENSOR, MODEL = 0.5, 4.0, 0.25


@dataclass(frozen=True)
class Distance:
    """The largest distances, relative to what they are of."""

    losses: float
    gradients: float


def distance(found: Trained, wanted: Trained) -> Distance:
    """How far two trainings are apart."""
    far = [_apart(found.gradients[name], value) / _top(value) for name, value in wanted.gradients.items()]
    return Distance(max(_relative(found.losses, wanted.losses)), max(far))


def differences(found: Trained, wanted: Trained, precision: str) -> Iterator[str]:
    """What is further apart than it may be, a line each."""
    dtype = DTYPES[precision]
    eps = torch.finfo(dtype).eps
    exact = dtype is torch.float32
    scalar = 1e-6 if exact else LOSS * eps
    for what, mine, theirs, margin in (
        ("loss", found.losses, wanted.losses, scalar),
        ("norm", found.norms, wanted.norms, scalar if exact else 2 * scalar),
    ):
        for step, far in enumerate(_relative(mine, theirs)):
            if not far <= margin:
                yield f"{what} of step {step}: {mine[step]!r}, in one process {theirs[step]!r}"
    first, last, model = (1e-6, 1e-5, 1e-7) if exact else (TENSOR * eps, TENSOR * eps, MODEL * eps)
    yield from _tensors("gradient", found.gradients, wanted.gradients, first, model)
    yield from _tensors("parameter", found.parameters, wanted.parameters, last, model)


def _tensors(
    what: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tensor: float, model: float
) -> Iterator[str]:
    floor = model * max(map(_top, wanted.values()), default=0.0)
    for name, value in wanted.items():
        if name not in found:
            yield f"{what} {name}: there is none"
            continue
        far, allowed = _apart(found[name], value), tensor * _top(value) + floor
        if not far <= allowed:
            yield f"{what} {name}: apart {far:.3g}, allowed {allowed:.3g}"


def _relative(found: Sequence[float], wanted: Sequence[float]) -> list[float]:
    return [abs(mine / theirs - 1) for mine, theirs in zip(found, wanted, strict=True)]


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).abs().max())


def _top(value: Tensor) -> float:
    return max(float(value.abs().max()), torch.finfo(torch.float32).tiny)

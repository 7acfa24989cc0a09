"""The memory layout that a parameter had before it was cut, for which it must be contiguous.

The whole optimizer's state gets this layout, as in plain PyTorch: torch's fused optimizers walk the memory of
a parameter and its state in step, ignoring strides.
"""

from __future__ import annotations

from torch import Tensor, nn

from opensmd.modelparallel.ranks.gathered import newly_gathered
from opensmd.modelparallel.runtime.tensors.memory_layout import strides_kept

__all__ = ["as_before_cutting", "describe_as", "make_contiguous"]


def make_contiguous(parameter: nn.Parameter) -> None:
    """Give a parameter contiguous memory, and remember how it lay."""
    if strides := strides_kept(parameter.shape, parameter.stride()):
        parameter._smp_strides = strides  # type: ignore[attr-defined]
    parameter.data = parameter.data.contiguous()


def describe_as(parameter: nn.Parameter, before: nn.Parameter) -> None:
    """Note for a parameter how the one lay in whose place it is."""
    if strides := _strides_of(before):
        parameter._smp_strides = strides  # type: ignore[attr-defined]


def as_before_cutting(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a gathered tensor of the parameter's shape in the layout that the parameter had."""
    strides = _strides_of(parameter)
    if not strides or whole.is_meta:  # without data, it is put together elsewhere or not wanted here
        return whole
    return newly_gathered(whole.new_empty_strided(whole.shape, strides).copy_(whole))


def _strides_of(parameter: nn.Parameter) -> tuple[int, ...]:
    strides: tuple[int, ...] = getattr(parameter, "_smp_strides", ())
    return strides

"""FP32 copies of 16-bit parameters, which the optimizer actually trains.

Rounding to 8 or 11 bits of mantissa would erase small updates. So the optimizer's groups contain a
full-precision copy of each such parameter, and every step ends by rounding the copies into the model::

    model's gradient --- to FP32, times 1 / loss scale ---> master's gradient
                                                                 | optimizer
    model's parameter <--------------- rounded ------------ master
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel.ranks.shards import local_part

__all__ = ["MasterWeights", "dense_gradients"]

_HALF = (torch.float16, torch.bfloat16)


class MasterWeights:
    """The masters of an optimizer's parameters.

    Args:
        numbers: of parameters in the whole optimizer, by identity; masters take over their parameters'
            numbers.
    """

    def __init__(self, numbers: dict[int, int]) -> None:
        self._numbers = numbers
        self._pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the master's identity

    def replace(self, group: dict[str, Any]) -> None:
        """Replace a parameter group's 16-bit parameters by masters."""
        for position, parameter in enumerate(group["params"]):
            if parameter.dtype in _HALF:
                master = nn.Parameter(parameter.detach().float())
                self._pairs[id(master)] = (parameter, master)
                self._numbers[id(master)] = self._numbers.pop(id(parameter))
                group["params"][position] = master

    def number(self, master: nn.Parameter) -> int:
        """Return a master's number in the whole optimizer, which is its parameter's."""
        return self._numbers[id(master)]

    def __iter__(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Iterate over the pairs of parameters and their masters."""
        return iter(self._pairs.values())

    def parameter_of(self, trained: nn.Parameter) -> nn.Parameter:
        """Return the model's parameter behind one in the optimizer's groups."""
        pair = self._pairs.get(id(trained))
        return trained if pair is None else pair[0]

    def take_gradients(self) -> None:
        """Give every master its parameter's gradient in FP32, or None."""
        for parameter, master in self:
            grad = parameter.grad
            if grad is None or master.grad is None or grad.is_sparse:
                master.grad = None if grad is None else grad.float()
            else:
                master.grad.copy_(grad)

    def round_into_model(self) -> None:
        """Write the masters into the model."""
        with torch.no_grad():
            for parameter, master in self:
                parameter.copy_(master)

    def follow_model(self) -> None:
        """Adopt parameters that the model got from elsewhere.

        A master that still rounds to its parameter stays, because it is more precise.
        """
        with torch.no_grad():
            for parameter, master in self:
                changed = master.to(parameter.dtype) != parameter
                torch.where(changed, parameter.to(master.dtype), master, out=master)

    def reload(self) -> None:
        """Set every master to its parameter."""
        with torch.no_grad():
            for parameter, master in self:
                master.copy_(parameter)


def dense_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients' values on this rank, to change in place; of sparse ones, the stored values."""
    dense = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            dense.append(parameter.grad.values())
        elif parameter.grad is not None:
            dense.append(local_part(parameter.grad))
    return dense

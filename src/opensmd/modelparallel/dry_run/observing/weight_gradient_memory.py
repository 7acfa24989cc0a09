"""What a stage keeps and saves if weight gradients are computed late, as the dry run shows it.

A matrix product or convolution of data with a weight keeps the data, and gets the gradient of its result.
From both it computes the weight's gradient when the rank has time (docs/design/pipeline.md, "In two parts").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.planning.costs.cost import accumulation_seconds
from opensmd.modelparallel.runtime.tensors.storages import StorageSet

__all__ = ["LateGradients"]

_aten = torch.ops.aten
# operations that compute the gradients of their factors independently, with the indices of these
_FACTORS = {_aten.mm: slice(0, 2), _aten.addmm: slice(1, 3), _aten.convolution: slice(0, 2)}


class LateGradients:
    """Sums by unit, for one microbatch.

    Args:
        is_parameter: whether a tensor is a parameter, or a view of one.

    Attributes:
        input_bytes: those of the layers' inputs; an input of several layers counts once.
        gradient_bytes: those of the gradients of the layers' results.
        seconds: for computing weight gradients and adding them up.
    """

    def __init__(self, is_parameter: Callable[[Tensor], bool]) -> None:
        self.input_bytes: dict[int, int] = defaultdict(int)
        self.gradient_bytes: dict[int, int] = defaultdict(int)
        self.seconds: dict[int, float] = defaultdict(float)
        self._is_parameter = is_parameter
        self._saved = StorageSet()
        self._weights = StorageSet()
        self._inputs = StorageSet()

    def save(self, tensor: Tensor) -> None:
        """Note that the next (or previous) operation saves ``tensor`` for its backward."""
        self._saved.add(tensor)

    def operation(
        self, func: Any, args: Sequence[Any], inputs: Sequence[Tensor], out: Any, unit: int, seconds: float
    ) -> None:
        """Note an operation on ``inputs`` in ``unit``, whose forward takes ``seconds``."""
        saved, self._saved = self._saved, StorageSet()
        if isinstance(out, Tensor) and inputs and all(map(self._is_weight, inputs)):
            self._weights.add(out)  # cast, normalised or transposed
        factors = _FACTORS.get(func.overloadpacket)
        if factors is None:
            return
        data, weight = args[factors]
        if self._is_weight(data):
            data, weight = weight, data
        # without a saved input, the weight is frozen or in a checkpoint; otherwise, it leads nowhere
        if data not in saved or not data.requires_grad or not self._is_weight(weight):
            return
        if self._inputs.add(data):
            self.input_bytes[unit] += data.untyped_storage().nbytes()
        self.gradient_bytes[unit] += out.numel() * out.element_size()
        size = weight.numel() * weight.element_size()
        self.seconds[unit] += seconds + accumulation_seconds(size, weight.device)

    def _is_weight(self, tensor: Tensor) -> bool:
        return self._is_parameter(tensor) or tensor in self._weights

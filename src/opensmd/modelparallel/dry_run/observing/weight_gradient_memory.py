"""What a stage keeps and saves where gradients of weights are computed late, as the dry run shows it.

A matrix product or convolution of data with a weight keeps the data, and gets the gradient of its result.
From both it computes the weight's gradient when the rank has time (docs/design/pipeline.md, "In two parts").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opensmd.modelparallel.planning.cost import accumulation_seconds
from opensmd.modelparallel.runtime.tensors.storages import StorageSet

__all__ = ["LateGradients"]

_aten = torch.ops.aten
# operations that compute the gradients of their factors independently of each other: where these are
_FACTORS = {_aten.mm: slice(0, 2), _aten.addmm: slice(1, 3), _aten.convolution: slice(0, 2)}


class LateGradients:
    """Sums by unit, of one microbatch.

    Args:
        is_parameter: whether a tensor is a parameter, or a view of one.

    Attributes:
        input_bytes: of the layers' inputs; one that several layers have counts once.
        gradient_bytes: of the gradients of the layers' results.
        seconds: of computing the weights' gradients and adding them up.
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
        """The operation that comes next keeps ``tensor`` for its backward (or the one before does)."""
        self._saved.add(tensor)

    def operation(
        self, func: Any, args: Sequence[Any], inputs: Sequence[Tensor], out: Any, unit: int, seconds: float
    ) -> None:
        """An operation on ``inputs`` ran in ``unit``; its forward takes ``seconds``."""
        saved, self._saved = self._saved, StorageSet()
        if isinstance(out, Tensor) and inputs and all(map(self._is_weight, inputs)):
            self._weights.add(out)  # cast, normalised, or transposed
        factors = _FACTORS.get(func.overloadpacket)
        if factors is None:
            return
        data, weight = args[factors]
        if self._is_weight(data):
            data, weight = weight, data
        # one that keeps no input has a frozen weight or is in a checkpoint; the other tests: it leads nowhere
        if data not in saved or not data.requires_grad or not self._is_weight(weight):
            return
        if self._inputs.add(data):
            self.input_bytes[unit] += data.untyped_storage().nbytes()
        self.gradient_bytes[unit] += out.numel() * out.element_size()
        size = weight.numel() * weight.element_size()
        self.seconds[unit] += seconds + accumulation_seconds(size, weight.device)

    def _is_weight(self, tensor: Tensor) -> bool:
        return self._is_parameter(tensor) or tensor in self._weights

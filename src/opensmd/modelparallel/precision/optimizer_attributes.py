"""What scripts read and call of an optimizer that may train in 16 bits, for one that trains in FP32.

They do so whether the settings ``fp16`` or ``bf16`` are on or not. Without them there is no loss scale, and
the parameters are their own masters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.precision.loss_scale import LossScale
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import WrappedOptimizer, state
from opensmd.modelparallel.tensor_parallel.shards import local_part
from opensmd.optim.norm import global_norm

__all__ = ["PrecisionAttributes"]


class PrecisionAttributes(WrappedOptimizer):
    """Mixed into every distributed optimizer."""

    param_groups: list[dict[str, Any]]
    overflow = False  # whether the last step was skipped because gradients were infinite or no numbers

    @property
    def master_params(self) -> list[nn.Parameter]:
        """What the optimizer trains on this rank: the FP32 copies of parameters that have 16 bits."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def loss_scaler(self) -> LossScale:
        """The loss scale and how it changes."""
        return LossScale()

    @property
    def loss_scale(self) -> float:
        """What ``model.backward`` multiplies losses by."""
        return self.loss_scaler.loss_scale

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """``model.backward(loss)``, for scripts that call it here; inside a step.

        ``update_master_grads`` is accepted: gradients reach the masters when a whole batch's are complete.

        Raises:
            SMPError: there is no ``smp.DistributedModel``.
        """
        if state.model is None:
            raise SMPError("optimizer.backward needs the model: call smp.DistributedModel first")
        state.model.backward(loss, retain_graph=retain_graph)

    def update_master_grads(self) -> None:
        """Bring the gradients to the masters; ``clip_master_grads`` and ``step`` do so if it is due."""

    def init_master_params(self) -> None:
        """Make the masters what the model's parameters are."""

    def reload_model_params(self) -> None:
        """Make the masters what the model's parameters are, after these were changed by hand."""
        self.init_master_params()

    def clip_master_grads(self, max_norm: float) -> float:
        """Clip the gradients of all partitions together to the 2-norm ``max_norm``; return their norm.

        Called on all ranks of the replica. Without fp16 and bf16 the parameters are their own masters.

        Returns:
            The norm before clipping; -1.0 after an overflow (fp16).
        """
        trained = [master for master in self.master_params if master.grad is not None]
        grads = [local_part(master.grad) for master in trained if master.grad is not None]
        counts = [self._smp_counts_here(master) for master in trained]
        counted = [grad for grad, counting in zip(grads, counts, strict=True) if counting]
        norm = global_norm(counted, group=state.require("clip_master_grads").groups[CommGroup.MP_GROUP])
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device, grad.dtype))
        return float(norm)

"""What scripts use on optimizers that may train in 16 bits, for those that train in FP32.

They do so whether the settings ``fp16`` or ``bf16`` are on or not. Without these there is no loss scale, and
parameters are their own masters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.precision.layout import Layout
from opensmd.modelparallel.precision.loss_scale import LossScale
from opensmd.modelparallel.precision.master_weights import dense_gradients
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import state
from opensmd.modelparallel.wrapped import WrappedOptimizer
from opensmd.optim.norm import global_norm
from opensmd.optim.param_groups import params_of

__all__ = ["PrecisionAttributes", "require_norm"]


class PrecisionAttributes(WrappedOptimizer):
    """Mixin of every distributed optimizer."""

    param_groups: list[dict[str, Any]]
    _smp_layout: Layout | None = None  # set when the model is partitioned
    _smp_waiting: dict[str, Any] | None = None  # a state dict that waits for masters to load it into
    overflow = False  # whether the last step was skipped because of infinite or NaN gradients

    @property
    def master_params(self) -> list[nn.Parameter]:
        """What the optimizer trains on this rank: the FP32 copies of 16-bit parameters."""
        return params_of(self.param_groups)

    @property
    def loss_scaler(self) -> LossScale:
        """The loss scale and how it changes."""
        return LossScale()

    @property
    def loss_scale(self) -> float:
        """The factor by which ``model.backward`` multiplies losses."""
        return self.loss_scaler.loss_scale

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's 16-bit parameters with masters on this rank, by parameter group."""
        return [[] for _ in self.param_groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[nn.Parameter]]:
        """Their masters, by parameter group."""
        return [[] for _ in self.param_groups]

    @property
    def fp32_from_fp32_groups(self) -> list[list[nn.Parameter]]:
        """The parameters that are their own masters, by parameter group."""
        return [list(group["params"]) for group in self.param_groups]

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run ``model.backward(loss)``, for scripts that call it here; inside a step.

        ``update_master_grads`` is accepted and ignored: gradients reach the masters when a whole batch's are
        complete.

        Raises:
            SMPError: there is no ``smp.DistributedModel``.
        """
        if state.model is None:
            raise SMPError("optimizer.backward needs the model: call smp.DistributedModel first")
        state.model.backward(loss, retain_graph=retain_graph)

    def update_master_grads(self) -> None:
        """Copy the gradients to the masters; ``clip_master_grads`` and ``step`` do so if needed."""

    def init_master_params(self) -> None:
        """Set the masters to the model's parameters."""

    def reload_model_params(self) -> None:
        """Set the masters to the model's parameters, after these were changed by hand."""
        self.init_master_params()

    def clip_master_grads(self, max_norm: float) -> float:
        """Clip the gradients of all partitions together to the 2-norm ``max_norm``; return their norm.

        All ranks of the replica must call. Without fp16 and bf16, the parameters are their own masters.

        Returns:
            The norm before clipping; -1.0 after an overflow (fp16).
        """
        norm = self._smp_clip(max_norm, state.require("clip_master_grads").groups[CommGroup.MP_GROUP])
        return float(norm)

    def _smp_clip(self, max_norm: float, group: dist.ProcessGroup) -> Tensor:
        """Clip like :meth:`clip_master_grads`; ``group`` are the calling ranks of the replica."""
        trained = [master for master in self.master_params if master.grad is not None]
        grads = dense_gradients(trained)
        counts = [self._smp_counts_here(master) for master in trained]
        counted = [grad for grad, counting in zip(grads, counts, strict=True) if counting]
        groups = [group] if self._smp_norm_group is None else [self._smp_norm_group, group]
        norm = global_norm(counted, groups=groups)
        if max_norm == math.inf:
            return norm
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device, grad.dtype))
        return norm

    def _smp_zero(self, parameters: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Zero gradients like torch's ``zero_grad``, for parameters that the optimizer has replaced."""
        for parameter in parameters:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                if parameter.grad.grad_fn is not None:
                    parameter.grad.detach_()  # views of a reducer's buckets cannot be detached
                parameter.grad.zero_()

    @property
    def _smp_norm_group(self) -> dist.ProcessGroup | None:
        """The ranks with other slices of the gradients to be clipped."""
        return None

    def _smp_collect_gradients(self) -> None:
        """Copy the gradients of split parameters to the slices that are trained."""

    def _smp_before_training(self) -> None:
        """Hook before training: all gradients are there and finite."""

    def _smp_lay_out(self, group: dict[str, Any]) -> None:
        """Hook after a parameter group has received its masters."""

    def _smp_complete_model(self) -> None:
        """Send what has been trained here to other ranks."""

    def _smp_model_parameter(self, trained: nn.Parameter) -> nn.Parameter:
        """Return the model's parameter of which the optimizer trains a slice."""
        return trained

    def _smp_own_part(self, number: int, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor shaped like parameter ``number``."""
        return whole

    def _smp_whole(self, number: int, part: Tensor) -> Tensor:
        """Return the whole tensor shaped like parameter ``number``; all ranks with parts must call."""
        return part


def require_norm(max_norm: object) -> None:
    """Refuse norms that gradients cannot be clipped to.

    Raises:
        TypeError: it is not a number.
        ValueError: it is negative or NaN.
    """
    if not isinstance(max_norm, (Real, Tensor)):
        raise TypeError(f"optimizer.clip_master_grads: max_norm must be a number, got {max_norm!r}")
    if isinstance(max_norm, Real) and not float(max_norm) >= 0:
        raise ValueError(
            f"optimizer.clip_master_grads: max_norm must be at least 0, got {max_norm}, which would turn all "
            "gradients around or make them NaN"
        )

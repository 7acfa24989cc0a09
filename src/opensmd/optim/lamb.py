"""FusedLAMB: layer-wise adaptive learning rates for large batches, with apex's settings."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from opensmd.optim.fused import Batch, FusedOptimizer, check_betas, refuse_amsgrad
from opensmd.optim.norm import global_norm
from opensmd.optim.param_groups import params_of

__all__ = ["FusedLAMB"]


class FusedLAMB(FusedOptimizer):
    """LAMB (You et al., 2020), preceded by clipping all gradients together as NVIDIA's BERT does.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: of the Adam update inside.
        bias_correction: divide the moments by ``1 - beta**step``.
        amsgrad: not available.
        adam_w_mode: weight decay is part of the update; False adds it to the gradient.
        grad_averaging: weight the new gradient with ``1 - beta1`` in the first moment; False: with 1.
        set_grad_none: what ``zero_grad()`` does by default.
        max_grad_norm: scale the gradients of all groups together down to this 2-norm; 0 disables that.
        use_nvlamb: also adapt the rate of parameters without weight decay.

    Attributes:
        norm_group: the ranks over which the norm of gradients is taken; ``smp.DistributedOptimizer`` sets it
            to those of the model's replica, so that a partitioned model is updated like a whole one; None in
            a copy.
    """

    norm_group: dist.ProcessGroup | None = None
    _attributes = (*FusedOptimizer._attributes, "adam_w_mode", "use_nvlamb")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        refuse_amsgrad("FusedLAMB", amsgrad)
        check_betas("FusedLAMB", betas, lr, eps)
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def prepare(self) -> None:
        """Compute the factor that brings the norm of all gradients down to ``max_grad_norm``."""
        limit = self.defaults["max_grad_norm"]
        parameters = params_of(self.param_groups)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = global_norm(grads, group=self.norm_group)
        self._shrink = torch.where(norm > limit, limit / norm, 1.0) if limit > 0 else torch.ones_like(norm)

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """One step: ``p -= lr * (|p| / |u|) * u`` with Adam's direction ``u``."""
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        parameters = batch.working()
        grads = list(torch._foreach_mul(batch.grads, self._shrink.to(batch.grads[0])))
        if decay and not self.adam_w_mode:
            torch._foreach_add_(grads, parameters, alpha=decay)
        first, second = batch.moment("exp_avg"), batch.moment("exp_avg_sq")
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        corrected = group["bias_correction"]
        update = torch._foreach_div(first, 1 - beta1**batch.step if corrected else 1.0)
        divisor = torch._foreach_div(second, 1 - beta2**batch.step if corrected else 1.0)
        torch._foreach_sqrt_(divisor)
        torch._foreach_add_(divisor, group["eps"])
        torch._foreach_div_(update, divisor)
        if decay and self.adam_w_mode:
            torch._foreach_add_(update, parameters, alpha=decay)
        if decay or self.use_nvlamb:
            torch._foreach_mul_(update, self._trust(parameters, list(update)))
        torch._foreach_add_(parameters, update, alpha=-float(group["lr"]))
        batch.store(parameters)

    @staticmethod
    def _trust(parameters: list[torch.Tensor], updates: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the ratio of each parameter's norm to its update's; 1 where either is zero."""
        sizes, steps = torch._foreach_norm(parameters), torch._foreach_norm(updates)
        return [
            torch.where((size > 0) & (step > 0), size / step, 1.0)
            for size, step in zip(sizes, steps, strict=True)
        ]

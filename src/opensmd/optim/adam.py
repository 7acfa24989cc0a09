"""FusedAdam: Adam and AdamW with apex's settings."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from opensmd.optim.fused import Batch, FusedOptimizer, check_betas, refuse_amsgrad

__all__ = ["FusedAdam"]


class FusedAdam(FusedOptimizer):
    """Adam (Kingma and Ba, 2015), with decoupled weight decay (Loshchilov and Hutter, 2019) by default.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: as torch's AdamW; ``weight_decay`` is 0 by default.
        bias_correction: divide the moments by ``1 - beta**step``.
        adam_w_mode: decoupled weight decay; False adds it to the gradient.
        amsgrad: not available.
        set_grad_none: what ``zero_grad()`` does by default.
    """

    _attributes = (*FusedOptimizer._attributes, "adam_w_mode")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_amsgrad("FusedAdam", amsgrad)
        check_betas("FusedAdam", betas, lr, eps)
        self.adam_w_mode = adam_w_mode
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """One step: ``p -= lr * (m / c1) / (sqrt(v / c2) + eps)``."""
        beta1, beta2 = group["betas"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        parameters, grads = batch.working(), batch.grads
        if decay and self.adam_w_mode:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, parameters, alpha=decay))
        first, second = batch.moment("exp_avg"), batch.moment("exp_avg_sq")
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        corrected = group["bias_correction"]
        first_correction = 1 - beta1**batch.step if corrected else 1.0
        second_correction = 1 - beta2**batch.step if corrected else 1.0
        divisor = torch._foreach_sqrt(second)
        torch._foreach_div_(divisor, second_correction**0.5)
        torch._foreach_add_(divisor, group["eps"])
        torch._foreach_addcdiv_(parameters, first, divisor, -lr / first_correction)
        batch.store(parameters)

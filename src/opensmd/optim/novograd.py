"""FusedNovoGrad: one second moment per tensor, with apex's settings."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from opensmd.optim.fused import Batch, FusedOptimizer, check_betas, refuse_amsgrad

__all__ = ["FusedNovoGrad"]


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad (Ginsburg et al., 2019).

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: as in the paper.
        bias_correction: divide the first moment by ``1 - beta1**step`` and the second by the square root of
            ``1 - beta2**step``.
        amsgrad: not available.
        reg_inside_moment: normalise the gradient and add weight decay before the first moment, as the paper
            does; False: after it.
        grad_averaging: weight the new gradient with ``1 - beta1`` in the first moment; False: with 1, as in
            the paper.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: start the second moment at zero; False: at that of the first gradient, as in the paper.
        set_grad_none: what ``zero_grad()`` does by default.
    """

    _attributes = (*FusedOptimizer._attributes, "reg_inside_moment")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_amsgrad("FusedNovoGrad", amsgrad)
        check_betas("FusedNovoGrad", betas, lr, eps)
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad: norm_type={norm_type!r} must be 2, or 0 for the maximum")
        self.reg_inside_moment = reg_inside_moment
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """One step: ``p -= lr * m`` with each gradient divided by its own norm's running mean."""
        beta1, beta2 = group["betas"]
        step, corrected = batch.step, group["bias_correction"]
        parameters = batch.working()
        norms = self._norms(group, batch, beta2)
        root = (1 - beta2**step) ** 0.5 if corrected else 1.0
        divisors = [norm / root + group["eps"] for norm in norms]
        weight = 1 - beta1 if group["grad_averaging"] else 1.0
        first = batch.moment("exp_avg")
        grads = list(batch.grads)
        if self.reg_inside_moment:
            grads = list(torch._foreach_div(grads, divisors))
            torch._foreach_add_(grads, parameters, alpha=group["weight_decay"])
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=weight)
        update = list(torch._foreach_div(first, 1 - beta1**step if corrected else 1.0))
        if not self.reg_inside_moment:
            torch._foreach_div_(update, divisors)
            torch._foreach_add_(update, parameters, alpha=group["weight_decay"])
        torch._foreach_add_(parameters, update, alpha=-float(group["lr"]))
        batch.store(parameters)

    @staticmethod
    def _norms(group: dict[str, Any], batch: Batch, beta2: float) -> list[torch.Tensor]:
        """Update and return the running norm of each tensor's gradients."""
        order = float("inf") if group["norm_type"] == 0 else 2
        norms = []
        for grad, entry in zip(batch.grads, batch.states, strict=True):
            new = torch.linalg.vector_norm(grad, order)
            old = entry.get("grad_norm")
            if old is None:
                old = torch.zeros_like(new) if group["init_zero"] else new
            if order == 2:
                entry["grad_norm"] = (beta2 * old.square() + (1 - beta2) * new.square()).sqrt()
            else:
                entry["grad_norm"] = beta2 * old + (1 - beta2) * new
            norms.append(entry["grad_norm"])
        return norms

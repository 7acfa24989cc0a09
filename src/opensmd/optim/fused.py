"""What the fused optimizers share: apex's settings, gradients in float32, one list per kind of tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from opensmd.optim.param_groups import params_of
from opensmd.upcast import upcast

__all__ = ["Batch", "FusedOptimizer", "check_betas", "refuse_amsgrad"]


@dataclass
class Batch:
    """Parameters with gradients that share group, device, dtype and step."""

    parameters: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    step: int

    def working(self) -> list[Tensor]:
        """Return the parameters, or copies in float32 where half precision would lose updates."""
        return [upcast(parameter) for parameter in self.parameters]

    def moment(self, name: str) -> list[Tensor]:
        """Return each parameter's state tensor ``name``, initially zeros of the parameter's shape."""
        for parameter, grad, entry in zip(self.parameters, self.grads, self.states, strict=True):
            if name not in entry:
                entry[name] = torch.zeros_like(parameter, dtype=grad.dtype)
        return [entry[name] for entry in self.states]

    def store(self, updated: list[Tensor]) -> None:
        """Write updated working copies back to the parameters."""
        for parameter, new in zip(self.parameters, updated, strict=True):
            if parameter is not new:
                parameter.copy_(new)


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that update many parameters with one operation.

    Args:
        params: parameters or groups, as for any torch optimizer.
        defaults: settings of a group.
        set_grad_none: what ``zero_grad()`` does by default.
    """

    _attributes: tuple[str, ...] = ("set_grad_none",)  # settings that are the same for all groups

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, set_grad_none: bool = True) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: torch's groups and state, and these attributes."""
        own = {name: getattr(self, name) for name in self._attributes}
        return {**super().__getstate__(), **own}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set gradients to None, or to zero with ``set_grad_none=False`` and no argument."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as it was saved; torch would narrow float32 tensors to the parameters' own type."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_sparse()
        self.prepare()
        for group in self.param_groups:
            for batch in self._batches(group):
                self.update(group, batch)
        return loss

    def prepare(self) -> None:
        """Compute what a step needs to know about all gradients before it changes anything."""

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update one batch of parameters."""
        raise NotImplementedError

    def _refuse_sparse(self) -> None:
        parameters = params_of(self.param_groups)
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
            raise RuntimeError(
                f"{type(self).__name__} does not take sparse gradients; use torch.optim.SparseAdam for "
                "the embedding, or Embedding(sparse=False)"
            )

    def _batches(self, group: dict[str, Any]) -> Iterator[Batch]:
        sorted_out: dict[tuple[Any, ...], Batch] = defaultdict(lambda: Batch([], [], [], 0))
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            entry = self.state[parameter]
            entry["step"] = int(entry.get("step", 0)) + 1
            batch = sorted_out[(parameter.device, parameter.dtype, entry["step"])]
            batch.parameters.append(parameter)
            batch.grads.append(upcast(parameter.grad))
            batch.states.append(entry)
            batch.step = entry["step"]
        yield from sorted_out.values()


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """Raise RuntimeError for AMSGrad, which apex does not have."""
    if amsgrad:
        raise RuntimeError(f"{name} has no AMSGrad variant; leave amsgrad out")


def check_betas(name: str, betas: tuple[float, float], lr: float, eps: float) -> None:
    """Raise ValueError for settings outside their range."""
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{name}: betas={betas} must be two numbers from 0 to below 1")
    if lr < 0.0 or eps < 0.0:
        raise ValueError(f"{name}: lr={lr} and eps={eps} must not be negative")

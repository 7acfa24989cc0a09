"""Tensors made of others, as libraries for quantization have them, and what trains beside or with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

__all__ = ["Adapted", "Quantized", "QuantizedMomentum"]

_OF_PARTS = {
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}


class Quantized(Tensor):
    """Whole numbers, and by how much they are multiplied."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Quantized:
        quantized: Quantized = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )
        quantized.codes, quantized.scale = codes, scale
        return quantized

    @classmethod
    def of(cls, tensor: Tensor) -> Quantized:
        """The nearest to a plain tensor."""
        scale = (tensor.abs().max() / 127).clamp(min=1e-12)
        return Quantized((tensor / scale).round().to(torch.int8), scale)

    def values(self) -> Tensor:  # type: ignore[override]
        """The plain tensor that it stands for."""
        return self.codes * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Quantized:
        return Quantized(inner["codes"], inner["scale"])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_PARTS:
            return Quantized(func(args[0].codes), func(args[0].scale))
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Quantized):
            source = args[1] if isinstance(args[1], Quantized) else Quantized.of(args[1])
            args[0].codes.copy_(source.codes)
            args[0].scale.copy_(source.scale)
            return args[0]
        args, kwargs = tree_map_only(Quantized, Quantized.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Quantized({self.codes}, {self.scale})"


torch.serialization.add_safe_globals([Quantized])


class QuantizedMomentum(torch.optim.Optimizer):
    """SGD with momentum, of which it keeps quantized numbers, and how often they were changed."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                before = state["momentum"].values() if state else torch.zeros_like(parameter)
                momentum = 0.9 * before + parameter.grad
                state["momentum"] = Quantized.of(momentum)
                state["square"] = Quantized.of(momentum.square())
                parameter.sub_(group["lr"] * momentum)


class Adapted(nn.Module):
    """A quantized linear layer that is not trained, and a narrow one beside it that is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        scale = width**-0.5
        self.base = nn.Parameter(Quantized.of(scale * torch.randn(width, width)), requires_grad=False)
        self.down = nn.Parameter(scale * torch.randn(2, width))
        self.up = nn.Parameter(torch.randn(width, 2))

    def forward(self, rows: Tensor) -> Tensor:
        return (nn.functional.linear(rows, self.base) + rows @ self.down.T @ self.up.T).tanh()

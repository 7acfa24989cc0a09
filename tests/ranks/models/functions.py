"""More than ordinary operations: custom autograd functions, torch.compile, jit.script, vmap, type checks."""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# some of torch's own functions have no annotations
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.ranks.models.case import CLASSES, WIDTH, Case, Chain, Layers

__all__ = ["CASES"]


class Square(torch.autograd.Function):
    """Doubles its gradient, so that one that is not called shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 4 * x * given[0]


class Mix(torch.autograd.Function):
    """Two tensors, a number and None in; two tensors out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: float, nothing: None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return x * y * scale, x + y

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, y = ctx.saved_tensors
        return y * given[0] * ctx.scale + given[1], x * given[0] * ctx.scale + given[1] * 2, None, None


class Marked(torch.autograd.Function):
    """One output without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        order = x.argsort(1)
        ctx.mark_non_differentiable(order)
        return x * 2, order

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:
        return given[0] * 3


class Custom(Layers):
    """Custom functions on values of one stage and of several."""

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(Square.apply(a))
        c, d = Mix.apply(a, torch.tanh(b), 0.5, None)
        e, order = Marked.apply(self.third(c))
        assert not order.requires_grad
        out: Tensor = self.head(e + d + order * 0.01)
        return out


class SquareLayer(nn.Module):
    """A custom function inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Square.apply(self.linear(x))
        return torch.tanh(y)


def custom_inside() -> nn.Module:
    return nn.Sequential(SquareLayer(), SquareLayer(), SquareLayer(), nn.Linear(WIDTH, CLASSES))


class Reverse(torch.autograd.Function):
    """Calls blocks in forward, keeps what the last returned alone, and calls them again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        ctx.blocks = blocks
        for block in blocks:
            x = x + block(x[:, :1])
        ctx.end = x.detach()
        return x

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        x, (gradient,) = ctx.end, given
        for block in reversed(ctx.blocks):
            with torch.enable_grad():
                first = x[:, :1].detach().requires_grad_()
                change = block(first)
            change.backward(gradient)
            x = x - change.detach()
            gradient = torch.cat([gradient[:, :1] + first.grad, gradient[:, 1:]], 1)
        return gradient, None


class Reversible(nn.Module):
    """Blocks that add to all but the first column what they make of it, without keeping their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Behind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Reverse.apply(x, self.blocks)
        return torch.tanh(out)


class Behind(nn.Module):
    """A layer that leaves the first column alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, WIDTH - 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.layer(x).tanh(), (1, 0))


def reversible() -> nn.Module:
    middle = nn.Sequential(Reversible(), nn.Linear(WIDTH, WIDTH), Reversible())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, CLASSES))


class Centre(nn.Module):
    """Takes off a scaled mean, and returns a function that puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        mean = x.mean(1, keepdim=True) * self.scale

        def back(y: Tensor) -> Tensor:
            return y + mean

        return x - mean, back


class PutBack(Layers):
    """A function of the first layers is called after the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = Centre()

    def forward(self, x: Tensor) -> Tensor:
        h, back = self.centre(self.first(x))
        out: Tensor = self.head(back(self.third(torch.tanh(self.second(h)))))
        return out


def compiled() -> nn.Module:
    model = Chain()
    model.second = torch.compile(model.second, backend="eager")  # type: ignore[assignment]
    model.third.compile(backend="eager")
    return model


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


class CompiledGelu(nn.Module):
    """A compiled function inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.gelu = torch.compile(gelu, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.gelu(x)


class Compiled(Layers):
    """Compiled functions in the glue, one of which calls modules, and in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.third = CompiledGelu()  # type: ignore[assignment]
        self.gelu = torch.compile(gelu, backend="eager")
        self.middle = torch.compile(self.begin, backend="eager", fullgraph=True)

    def begin(self, x: Tensor) -> Tensor:
        out: Tensor = self.gelu(self.second(self.first(x))) + x
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.third(self.middle(self.gelu(x))))
        return out


@torch.jit.script
def scripted_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


@torch.jit.script
def scripted_mix(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return x * scale if bool(y.sum() > 0) else x - y * scale


class ScriptedGelu(nn.Module):
    """A scripted function inside a module."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = scripted_gelu(x)
        return out


class Scripted(Layers):
    """Scripted functions in the glue and in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.third = ScriptedGelu()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = scripted_gelu(x)
        h = scripted_mix(self.second(self.first(x)), x, scale=0.5)
        out: Tensor = self.head(self.third(h))
        return out


def scripted_module() -> nn.Module:
    model = Chain()
    model.second = torch.jit.script(model.second)  # type: ignore[assignment]
    return model


class Rowwise(nn.Module):
    """torch.vmap inside a module."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.vmap(lambda row: row / row.norm())(x)
        return out


class Mapped(Layers):
    """torch.vmap over inputs, which every rank has, and in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.rowwise = Rowwise()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.vmap(lambda row: row * row.sum())(x)
        h = self.rowwise(self.second(torch.tanh(self.first(x))))
        out: Tensor = self.head(self.third(h))
        return out


class Questions(Layers):
    """Asks a placed tensor everything that needs no data."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        assert isinstance(h, Tensor) and torch.is_tensor(h) and h.is_floating_point()
        assert h.dtype == torch.float32 and h.device.type == "cpu" and h.is_contiguous()
        assert h.shape == x.shape and h.size(-1) == WIDTH and h.stride() == (WIDTH, 1) and len(h) == len(x)
        assert h.dim() == h.ndim == 2 and h.numel() == x.numel() and h.element_size() == 4
        assert h.requires_grad == torch.is_grad_enabled() and not h.is_leaf and h.grad_fn is not None
        assert not h.detach().requires_grad and torch.result_type(h, 1.0) == torch.float32
        low = torch.full((), torch.finfo(h.dtype).min, device=h.device).clamp(min=0)
        fresh = h.new_zeros(WIDTH) + torch.ones_like(h) * 0.1 + torch.empty_like(h).fill_(0.2)
        h = h.to(torch.float64).to(h.dtype).type_as(x).to(x.device).contiguous()
        out: Tensor = self.head(self.third(h) + fresh + low)
        return out


class Operators(Layers):
    """Python operators with the placed value on either side, matmul, comparison, fancy indices."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        h = 1 - h / 2 + 2 ** (h * 0.1) + (-h).abs() ** 2 + (h > 0) * 0.1 + (x < h) * 0.1
        h = h @ torch.eye(WIDTH) + x @ (h.T @ h) * 0.001
        h = h[:, [*range(1, WIDTH), 0]] + h[..., None].squeeze(-1) + h[:, :1].expand(-1, WIDTH)
        h = F.normalize(h, dim=-1) * F.softplus(self.third(h)) + F.layer_norm(h, (WIDTH,))
        out: Tensor = self.head(F.dropout(h, 0.5, training=False))
        return out


@torch.library.custom_op("opensmd_tests::times", mutates_args=())
def times(x: Tensor, scale: float) -> Tensor:
    return x * scale


@times.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _keep_scale(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.scale = inputs[1]


times.register_autograd(lambda ctx, gradient: (gradient * ctx.scale * 2, None), setup_context=_keep_scale)


@torch.library.custom_op("opensmd_tests::raise_", mutates_args={"x"})
def raise_(x: Tensor, by: Tensor) -> None:
    x.add_(by)


class CustomOperations(Layers):
    """Operations of torch.library between modules: with a backward of their own, and in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = times(torch.tanh(self.first(x)), 0.5)
        raised = h.detach().clone()
        with torch.no_grad():
            raise_(raised, torch.ones(WIDTH))
        g = torch.ops.opensmd_tests.times(self.third(self.second(h)), 2.0)
        with torch.no_grad():
            raise_(raised, g.detach())
        out: Tensor = self.head(g + raised)
        return out


class Counting(TorchFunctionMode):
    """Sees what is called inside, as profilers do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Watched(Layers):
    """Modules and operations within function modes of the script."""

    def forward(self, x: Tensor) -> Tensor:
        with Counting():
            h = torch.tanh(self.first(x))
            with Counting():
                h = self.second(h) + Square.apply(h)
        out: Tensor = self.head(self.third(h))
        return out


@functools.lru_cache(maxsize=8)
def cached_positions(length: int) -> Tensor:
    return torch.arange(length) / length


class Remembered(Layers):
    """A function remembers the tensor that it made, first in the dry run."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.third(torch.tanh(self.second(torch.tanh(self.first(x + cached_positions(WIDTH))))))
        out: Tensor = self.head(torch.tanh(h))
        return out


CASES = (
    Case("custom functions in the glue", Custom),
    Case("custom operations", CustomOperations),
    Case("function modes of the script", Watched),
    Case("custom functions in modules", custom_inside, ("0", "1", "2", "3")),
    Case("reversible blocks", reversible, ()),
    Case("modules that return functions", PutBack, ()),
    Case("compiled modules", compiled),
    Case("compiled functions", Compiled),
    Case("scripted functions", Scripted, whole=False),
    Case("scripted module", scripted_module, automatic=False),
    Case("scripted module, placed automatically", scripted_module, ()),
    Case("vmap", Mapped, ("first", "second", "rowwise", "third")),
    Case("questions without data", Questions),
    Case("operators", Operators, whole=False),
    Case("functions that remember", Remembered, ()),
)

"""What modules take and return: dicts, dataclasses, tuples, named tuples, None, keywords."""

# mypy: disable-error-code="no-any-return, dict-item"
# some of torch's own functions have no annotations
from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.models.case import CLASSES, WIDTH, Batch, Case, Layers, classify

__all__ = ["CASES"]


class Layer(nn.Module):
    """A linear layer with another way to give its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class AsDict(Layer):
    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"out": y, "parts": [y[:, :2], (y[:, 2:], None)], "width": WIDTH, 3: "three"}


class AsOrderedDict(Layer):
    def forward(self, given: dict[str, Any]) -> OrderedDict[str, Tensor]:
        return OrderedDict(
            out=self.linear(given["out"]) + given["parts"][0].sum(), again=given["parts"][1][0]
        )


class Dicts(Layers):
    """Nested dicts and lists cross stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = AsDict(), AsOrderedDict()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a = self.first(x)
        b = self.second(a)
        h = self.third(b["out"] * a["width"] / 10) + b["again"].mean()
        return {"logits": self.head(h)}


def dict_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)["logits"], y)


@dataclass
class Plain:
    """Unknown to pytree."""

    hidden: Tensor
    note: str = "plain"
    extra: Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    """Cannot be changed in place."""

    hidden: Tensor
    inner: Plain


@dataclass
class Registered:
    """Known to pytree."""

    hidden: Tensor
    count: int = 3


torch.utils._pytree.register_dataclass(Registered)


class Answer(OrderedDict[str, Any]):
    """A dict with attributes, like Hugging Face's ModelOutput."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class AsPlain(Layer):
    def forward(self, x: Tensor, *, scale: float, extra: Tensor | None = None) -> Plain:
        return Plain(self.linear(x) * scale, extra=extra)


class AsFrozen(Layer):
    def forward(self, given: Plain) -> Frozen:
        assert given.note == "plain" and given.extra is not None
        return Frozen(self.linear(given.hidden), Plain(given.extra * 2, note="inner"))


class AsRegistered(Layer):
    def forward(self, given: Frozen) -> Registered:
        return Registered(self.linear(given.hidden) + given.inner.hidden)


class Dataclasses(Layers):
    """Dataclasses go in and out of modules, and out of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = AsPlain(), AsFrozen(), AsRegistered()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Answer:
        third = self.third(self.second(self.first(x, scale=0.5, extra=x)))
        return Answer(logits=self.head(third.hidden * third.count), cache=None)


def answer_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).logits, y)


class Pair(NamedTuple):
    """Typed."""

    left: Tensor
    right: Tensor | None


Triple = namedtuple("Triple", ["a", "b", "c"])


class AsPair(Layer):
    def forward(self, x: Tensor) -> Pair:
        return Pair(self.linear(x), None)


class AsTriple(Layer):
    def forward(self, *given: Tensor | None, **named: Tensor) -> tuple[Any, ...]:
        assert given[1] is None
        return Triple(self.linear(given[0]), named["y"] * 2, ()), [named["y"]]


class Tuples(Layers):
    """Tuples, named tuples, empty ones, None among results, *args and **kwargs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = AsPair(), AsTriple()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        pair = self.first(x)
        triple, (again,) = self.second(*pair, y=x)
        assert triple.c == ()
        return self.head(self.third(triple.a + again) + triple.b), None


def tuple_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits, nothing = model(x)
    assert nothing is None
    return F.cross_entropy(logits, y)


class Keywords(Layers):
    """None, flags, defaults and a mask by keyword; the model is called with keywords, too."""

    def forward(
        self,
        x: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        twice: bool = False,
    ) -> Tensor:
        assert x is not None
        h = self.first(x)
        if mask is not None:
            h = h * mask
        h = self.second(input=h)
        if bias is not None or twice:
            h = self.third(h)
        out: Tensor = self.head(h)
        return out


def keyword_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x=x, mask=(x > 0).float(), bias=None, twice=True), y)


def dict_batch(step: int, rows: int) -> Batch:
    x, y = classify(step, rows)
    return {"x": x, "mask": (x > 0).float(), "bias": None}, y


def dict_batch_loss(model: nn.Module, given: dict[str, Any], y: Tensor) -> Tensor:
    return F.cross_entropy(model(**given), y)


class Remembers(nn.Module):
    """Leaves a value in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        y = self.linear(x)
        seen.append(y)
        return torch.tanh(y)


class SideEffects(nn.Module):
    """Children fill a list that their parent, on the same stage, reads."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Remembers(), Remembers()

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        return self.right(self.left(x, seen), seen) + seen[0] * seen[1]


def side_effects() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), SideEffects(), SideEffects(), nn.Linear(WIDTH, CLASSES))


class Doubles(nn.Module):
    """Returns one tensor twice, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.kept = torch.tanh(self.linear(x))
        return self.kept, self.kept


class SameTensors(Layers):
    """One tensor has several names, and is used by all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Doubles()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        one, same = self.first(x)
        assert one is same and same is self.first.kept
        h = torch.tanh(self.second(one)) * self.third(same)
        out: Tensor = self.head(h + self.third(self.first.kept))
        return out


class Fills(nn.Module):
    """Writes into the dict and the list that it is given, and reads what is there."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number = number

    def forward(self, x: Tensor, seen: dict[str, Any], losses: list[Tensor]) -> Tensor:
        y = torch.tanh(self.linear(x))
        for tensor in seen.get("all", []):
            y = y + tensor
        seen["latest"] = y
        seen.setdefault("all", []).append(x)
        seen.pop("number", None)
        if self.number != 1:
            seen["number"] = self.number
        losses.append(y.square().mean())
        return y


class FilledTogether(Layers):
    """Layers on several stages fill one dict and one list."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(("first", "second", "third")):
            setattr(self, name, Fills(number))

    def forward(self, x: Tensor) -> Tensor:
        seen: dict[str, Any] = {"all": []}
        losses: list[Tensor] = []
        everything = seen["all"]
        h = self.first(x, seen, losses)
        assert seen["number"] == 0
        h = self.second(h, seen, losses)
        assert "number" not in seen
        h = self.third(h, seen, losses)
        assert everything is seen["all"] and len(everything) == 3 and everything[0] is x
        out: Tensor = self.head(h + seen["latest"] + everything[1])
        return out * torch.stack(losses).sum()


class HandsBack(nn.Module):
    """Returns the dict and the list that it was given, filled or as they are."""

    def __init__(self, fills: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fills = fills

    def forward(self, given: dict[str, Any], seen: list[Tensor]) -> tuple[Any, ...]:
        h = torch.tanh(self.linear(given["h"]))
        if self.fills:
            given["h"] = h
            seen.append(h.mean())
        return given, seen, h


class HandedBack(Layers):
    """Goes on with what comes back, and reads it under the name that it had before."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second", "third"):
            setattr(self, name, HandsBack(name != "second"))

    def forward(self, x: Tensor) -> Tensor:
        given: dict[str, Any] = {"h": x}
        seen: list[Tensor] = []
        for layer in (self.first, self.second, self.third):
            back, same, h = layer(given, seen)
            assert back is given and same is seen
            back["h"] = back["h"] * 1.5 + h
            same.append(h.std())
        out: Tensor = self.head(given["h"])
        return out * torch.stack(seen).sum()


CASES = (
    Case("arguments that come back", HandedBack, whole=False),
    Case("one tensor by several names", SameTensors),
    Case("a dict and a list filled by several stages", FilledTogether, whole=False),
    Case("dicts", Dicts, loss=dict_loss, whole=False, tolerance=2e-5),  # the terms of its gradients cancel
    Case("dataclasses", Dataclasses, loss=answer_loss),
    Case("tuples", Tuples, loss=tuple_loss),
    Case("keywords and None", Keywords, loss=keyword_loss),
    Case(
        "a dict as batch",
        Keywords,
        batch=dict_batch,
        loss=dict_batch_loss,
        settings={"find_unused_parameters": True},
    ),
    Case("lists filled inside a stage", side_effects, ("0", "1", "2", "3"), automatic=False),
)

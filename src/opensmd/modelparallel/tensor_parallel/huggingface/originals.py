"""The names of Hugging Face modules that distributed ones have replaced, and their state dicts.

A distributed module may be the whole model or a part, such as the body under the script's own head; names are
translated only inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.tensor_parallel.huggingface.translation import Translations

__all__ = [
    "Original",
    "as_distributed",
    "as_original",
    "note_original",
    "original_of",
    "originals_in",
    "parameters_of_original",
]

_ORIGINAL = "_smp_original"
Shapes = dict[str, torch.Size]


@dataclass(frozen=True)
class Original:
    """A module that a distributed one has replaced.

    Attributes:
        to_original, to_distributed: translate entries of its state dict, perhaps only some of them.
        shapes: those of its parameters, in its order.
        here: for each of the distributed module's parameters, the original ones it is made of, and its shape.
    """

    to_original: Callable[[Mapping[str, Any]], dict[str, Any]]
    to_distributed: Callable[[Mapping[str, Any]], dict[str, Any]]
    shapes: Shapes
    here: dict[str, tuple[list[str], torch.Size]]


def original_of(module: nn.Module, translations: Translations) -> Original:
    """Describe a module before it is replaced, without keeping it alive.

    Raises:
        ValueError: of parameters that become one, only some are frozen.
    """
    to_original, to_distributed = translations
    has_head = any(name.startswith("lm_head.") for name in module.state_dict())

    def back(entries: Mapping[str, Any]) -> dict[str, Any]:
        return to_original(entries, has_head=has_head)

    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    without_data = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    here = {
        name: (list(back({name: value})), value.shape) for name, value in to_distributed(without_data).items()
    }
    parameters = dict(module.named_parameters())
    for olds, _ in here.values():
        if len({parameters[name].requires_grad for name in olds}) > 1:
            raise ValueError(f"of {', '.join(olds)}, which become one, some are frozen and others are not")
    return Original(back, to_distributed, shapes, here)


def note_original(distributed: nn.Module, original: Original) -> None:
    """Store it in a distributed module."""
    distributed.__dict__[_ORIGINAL] = original


def originals_in(module: nn.Module) -> dict[str, Original]:
    """Return what distributed modules have stored, by the prefix of their parameters' names."""
    return {
        f"{name}." if name else "": submodule.__dict__[_ORIGINAL]
        for name, submodule in module.named_modules()
        if _ORIGINAL in submodule.__dict__
    }


def as_original(module: nn.Module, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Convert entries of a model's state dict to the original model's names and shapes."""
    return _translated(module, entries, lambda original: original.to_original)


def as_distributed(module: nn.Module, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Convert entries of the original model's state dict to the distributed one's names and shapes."""
    return _translated(module, entries, lambda original: original.to_distributed)


def parameters_of_original(module: nn.Module) -> Iterator[tuple[str, torch.Size]]:
    """Return the names and shapes of the original model's parameters, in its order."""
    originals = originals_in(module)
    seen: set[str] = set()
    for name, parameter in module.named_parameters():
        place = _place(name, originals)
        if place is None:
            yield name, parameter.shape
        elif place not in seen:
            seen.add(place)
            yield from ((place + own, shape) for own, shape in originals[place].shapes.items())


def _translated(
    module: nn.Module,
    entries: Mapping[str, Any],
    direction: Callable[[Original], Callable[[Mapping[str, Any]], dict[str, Any]]],
) -> dict[str, Any]:
    originals = originals_in(module)
    parts: dict[str | None, dict[str, Any]] = {}
    for name, value in entries.items():
        place = _place(name, originals)
        parts.setdefault(place, {})[name.removeprefix(place or "")] = value
    translated: dict[str, Any] = {}
    for place, part in parts.items():
        if place is None:
            translated |= part
        else:
            translated |= {place + name: value for name, value in direction(originals[place])(part).items()}
    return translated


def _place(name: str, originals: Mapping[str, Original]) -> str | None:
    return next((place for place in originals if name.startswith(place)), None)

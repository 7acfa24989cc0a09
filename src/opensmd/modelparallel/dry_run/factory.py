"""Loading a model from ``module:factory``, for planning before the script has created its own."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["model_and_step"]


def model_and_step(target: str) -> tuple[nn.Module, Callable[[], Any] | None]:
    """Import and call a factory; return the model and its step, if there is one.

    Args:
        target: ``module:factory``, also looked up in the working directory. The factory returns the model and
            its step, or the model and inputs, or just the model.

    Raises:
        ValueError: it cannot be imported, takes arguments, or returns something else.
    """
    made = _factory(target)()
    if isinstance(made, nn.Module):
        return made, None
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(
            f"{target} returned {type(made).__name__}; expected a model, (model, call) or (model, inputs)"
        )
    return made[0], _step(target, *made)


def _factory(target: str) -> Callable[[], Any]:
    module_name, colon, attribute = target.partition(":")
    if not colon or not attribute:
        raise ValueError(f"{target!r} is not of the form module:factory")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{target!r}: {error}") from error
    if not callable(factory) or isinstance(factory, nn.Module):
        raise ValueError(
            f"{target!r} is of type {type(factory).__name__}; expected a function that returns the model"
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ValueError(f"{target!r}: {error}; it is called without arguments") from error
    return factory  # type: ignore[no-any-return]


def _step(target: str, model: nn.Module, second: Any) -> Callable[[], Any]:
    if isinstance(second, dict):
        return lambda: model(**second)
    if isinstance(second, tuple | list):
        return lambda: model(*second)
    if isinstance(second, torch.Tensor):
        return lambda: model(second)
    if callable(second):
        return second  # type: ignore[no-any-return]
    raise ValueError(
        f"{target} returned a model and {type(second).__name__}; expected a function, inputs or a tensor"
    )

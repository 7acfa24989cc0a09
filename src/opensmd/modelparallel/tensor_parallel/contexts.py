"""Choosing modules to distribute: ``smp.tensor_parallelism`` and ``smp.set_tensor_parallelism``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from opensmd.modelparallel.compatibility.created_modules import CreationMark
from opensmd.modelparallel.state import state

__all__ = ["Wish", "set_tensor_parallelism", "tensor_parallelism", "wish_of"]


@dataclass(frozen=True)
class Wish:
    """The mark on a module.

    Attributes:
        enabled: whether to distribute it.
        config: arguments for the distributed module that override those of the module.
    """

    enabled: bool
    config: dict[str, Any]


_CREATED = CreationMark("_smp_tensor_parallelism")


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Distribute the supported modules that are created inside, when ``smp.DistributedModel`` wraps them.

    Of nested modules, the outermost supported one is distributed; the innermost context counts. A module that
    shares parameters with others, or whose sizes the number of ranks does not divide, is not changed.

    Args:
        enabled: False exempts modules from an outer context.
        kwargs: arguments for the distributed modules, such as ``attention_in_fp32=True``; those that a module
            does not accept are ignored.
    """
    with _CREATED.put(Wish(enabled, kwargs)):
        yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **kwargs: Any) -> None:
    """Mark an existing module and its submodules as :func:`tensor_parallelism` does, before it is wrapped.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: ``smp.DistributedModel`` has already wrapped a model.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"smp.set_tensor_parallelism: expected a torch.nn.Module, got {module!r:.80}")
    if enabled and state.model is not None:
        raise ValueError(
            "smp.set_tensor_parallelism: smp.DistributedModel has distributed the model already; call "
            "it before"
        )
    for submodule in module.modules():
        submodule.__dict__[_CREATED.attribute] = Wish(enabled, kwargs)


def wish_of(module: nn.Module) -> Wish | None:
    """Return the module's mark, if it should be distributed."""
    wish = module.__dict__.get(_CREATED.attribute)
    return wish if isinstance(wish, Wish) and wish.enabled else None

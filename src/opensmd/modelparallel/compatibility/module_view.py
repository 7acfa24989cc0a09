"""The object ``model.module``: a view of the user's module, with one level below it.

In the originals there are wrappers between DistributedModel and the user's module, and scripts reach through
them: ``model.module.module.state_dict()``. With an alias (``module.module is module``), code that unwraps by
``while hasattr(model, "module")`` would loop forever. So ``model.module`` is an object of a class derived
from the user's, which shares its ``__dict__`` and so its attributes; its ``module`` is the user's module,
which has none:

    DistributedModel  .module ->  view  .module ->  the user's module
                                    `---- __dict__ ----'

For a model in 16 bits the originals have one more wrapper, so there is one more view.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn

__all__ = ["is_view_of", "view_of", "viewed"]


class ModuleView:
    """An object that shares a module's attributes; the first base of a view's class, before the user's class.

    Calls, copies, pickles and class changes go to the module, and the view equals the module.
    """

    __slots__ = ()
    _viewed: nn.Module
    _below: Any

    def __init_subclass__(cls, **_: Any) -> None:
        """Keep views out of registries of subclasses that the user's classes may have."""

    @property
    def module(self) -> Any:
        """The user's module's own attribute of this name, or else the level below."""
        return getattr(self._viewed, "module", self._below)

    @module.setter
    def module(self, value: Any) -> None:
        self._viewed.module = value

    @property
    def __class__(self) -> Any:
        """The user's current class, even if a library has replaced it."""
        return type(self._viewed)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        self._viewed.__class__ = cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._viewed(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self._viewed == other

    def __hash__(self) -> int:
        return hash(self._viewed)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._viewed.__reduce_ex__(protocol)

    def __del__(self) -> None:
        """Leave the finalizer of the user's class to the module."""


def view_of(module: nn.Module, levels: int = 1) -> Any:
    """Return a view of ``module``, of a class derived from its own, ``levels`` above the module."""
    cls = type(module)
    names = {
        "__slots__": ("_viewed", "_below"),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__jit_unused_properties__": [*getattr(cls, "__jit_unused_properties__", ()), "module", "__class__"],
    }
    kind = types.new_class(cls.__name__, (ModuleView, cls), exec_body=lambda body: body.update(names))
    below: Any = module
    for _ in range(levels):
        view: Any = object.__new__(kind)
        view.__dict__ = module.__dict__
        object.__setattr__(view, "_viewed", module)  # nn.Module's __setattr__ would register a child
        object.__setattr__(view, "_below", below)
        below = view
    return below


def viewed(module: nn.Module) -> nn.Module:
    """Return the module behind a view, or the module itself."""
    return module._viewed if issubclass(type(module), ModuleView) else module  # type: ignore[return-value]


def is_view_of(view: object, module: nn.Module) -> bool:
    """Whether it is a view of this module with the module's current class."""
    return isinstance(view, type(module)) and type(view).__mro__[2] is type(module) and view == module

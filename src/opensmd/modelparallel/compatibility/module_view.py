"""What ``model.module`` is: the user's module once more, with one level below it.

In the originals wrappers lie between DistributedModel and the user's module, and scripts reach through them:
``model.module.module.state_dict()``. An alias (``module.module is module``) would
loop all code that unwraps by ``while hasattr(model, "module")``. So ``model.module`` is an object of a class
derived from the user's, with the very same attributes, because both have one ``__dict__``; its ``module`` is
the user's module, which has none:

    DistributedModel  .module ->  view  .module ->  the user's module
                                    `---- __dict__ ----'

With a model in 16 bits the originals had a wrapper more, and there is a view more.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn

__all__ = ["is_view_of", "view_of", "viewed"]


class ModuleView:
    """Another object with the attributes of a module; comes before the user's class in a view's class.

    Calls, copies, pickles and changes of class are the module's, and it is equal to the module.
    """

    __slots__ = ()
    _viewed: nn.Module
    _below: Any

    def __init_subclass__(cls, **_: Any) -> None:
        """Keep views out of the registers that user's classes have of those derived from them."""

    @property
    def module(self) -> Any:
        """What the user's module calls so, or else the level below."""
        return getattr(self._viewed, "module", self._below)

    @module.setter
    def module(self, value: Any) -> None:
        self._viewed.module = value

    @property
    def __class__(self) -> Any:
        """The user's class, also once a library has put another one in its place."""
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
        """Leave what the user's class does at its end to the module."""


def view_of(module: nn.Module, levels: int = 1) -> Any:
    """A view of ``module``, of a class derived from its class, with so many ``levels`` above the module."""
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
        object.__setattr__(view, "_viewed", module)  # not nn.Module's, which would register a child
        object.__setattr__(view, "_below", below)
        below = view
    return below


def viewed(module: nn.Module) -> nn.Module:
    """The module itself, of a view or of itself."""
    return module._viewed if issubclass(type(module), ModuleView) else module  # type: ignore[return-value]


def is_view_of(view: object, module: nn.Module) -> bool:
    """Whether it is a view of this module, and of the class that the module has now."""
    return isinstance(view, type(module)) and type(view).__mro__[2] is type(module) and view == module

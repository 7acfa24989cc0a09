"""The compiled core as a module: ``core.Mailbox``, ``core.make_shared_backend`` and so on.

``core.pyi`` lists its contents. Nothing is loaded or built before one of its names is used.
"""

from __future__ import annotations

from typing import Any

from opensmd.native.build import load

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    """Load a name of the compiled core.

    Raises:
        BuildError: there is no core, and none can be built.
    """
    if name.startswith("__"):  # the import system and inspect look up optional names
        raise AttributeError(name)
    value = getattr(load(), name)
    globals()[name] = value
    return value

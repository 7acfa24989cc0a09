"""Giving the CPU to ``FullyShardedDataParallel``, which asks torch for an accelerator.

Importing it takes half a second, which scripts that shard nothing should not pay, so it is changed when the
script imports it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

__all__ = ["forget_import", "on_cpu_alone", "when_imported"]

_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"


class _ShardedFinder(MetaPathFinder):
    """Finds that one module like Python, and passes it on once it is loaded."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_tell(module: ModuleType) -> None:
            load(module)
            self._then(module)

        spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


def when_imported(then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with the module of ``FullyShardedDataParallel``, now or when the script imports it."""
    if _MODULE in sys.modules:
        then(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _ShardedFinder(then))


def forget_import() -> None:
    """Undo :func:`when_imported`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _ShardedFinder)]


def on_cpu_alone(init: Callable[..., None]) -> Callable[..., None]:
    """Return a ``FullyShardedDataParallel.__init__`` that shards on the CPU, without offloading."""
    signature = inspect.signature(init)

    @wraps(init)
    def call(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(device_id=torch.device("cpu"), cpu_offload=None)
        init(*bound.args, **bound.kwargs)

    return call

"""The same models in torch's own pipelining: does its tracer split them in two?"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from tests.zoo.catalogue import find
from tests.zoo.model import seeded
from tests.zoo.training import pieces, quiet

__all__ = ["tracer_problem"]


def tracer_problem(name: str) -> str | None:
    """Why ``torch.distributed.pipelining.pipeline`` cannot cut a model in two; None if it can."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    model = find(name)
    with quiet():
        module = seeded(model, load=False, checkpoint=False)
        with contextlib.suppress(AttributeError):  # caches of keys are outputs that its tracer cannot have
            module.config.use_cache = False  # type: ignore[union-attr]
        batch = next(iter(pieces(model.batch(0))))
        where = {_middle(module): SplitPoint.BEGINNING}
        try:
            pipeline(module, (), batch, where)
        except Exception as error:
            return f"{type(error).__name__}: {_first_line(error)}"
    return None


def _middle(module: nn.Module) -> str:
    """The name of the middle one of the longest row of layers, or of all children."""
    rows = [
        (len(submodule), name)
        for name, submodule in module.named_modules()
        if isinstance(submodule, nn.ModuleList | nn.Sequential)
    ]
    length, name = max(rows, key=lambda row: row[0], default=(0, ""))
    if length >= 2:
        return f"{name}.{length // 2}" if name else str(length // 2)
    children = [child for child, _ in module.named_children()]
    return children[len(children) // 2]


def _first_line(error: Any) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]

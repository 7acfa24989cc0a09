"""One intercepted call, as the parts of the runtime hand it on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from opensmd.modelparallel.runtime.tensors.tags import Tag

__all__ = ["Call"]


@dataclass(slots=True)
class Call:
    """One intercepted call.

    Attributes:
        name: for messages, and part of the key.
        key: what makes two calls alike besides their arguments.
        leaves: the tensors in ``args`` and ``kwargs``.
        tags: theirs, before the call.
        whole: it runs as a whole: nothing inside is intercepted.
        written: the arguments that it writes into.
        depends_on_data: its result's shape does.
        lasting: its result is no microbatch's own, like a parameter's gradient.
        owner: the module whose attributes it may set.
        parents: the tags of arguments that gradients go back to.
        serial: of the microbatch whose its result is, counted over all steps; -1 if that is none.
    """

    name: str
    key: Hashable
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Tensor]
    tags: list[Tag | None]
    whole: bool = False
    written: tuple[Tensor, ...] = ()
    depends_on_data: bool = False
    lasting: bool = False
    owner: nn.Module | None = None
    parents: tuple[Tag, ...] = ()
    serial: int = -1

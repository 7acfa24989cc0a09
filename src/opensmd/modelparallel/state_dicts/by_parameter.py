"""An optimizer's entries by parameter. Scripts and other libraries put further keys into its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

__all__ = ["by_parameter"]


def by_parameter(entries: Mapping[Any, Any]) -> Iterator[tuple[Tensor, MutableMapping[Any, Any]]]:
    """Go over each parameter and its entries, which may be replaced meanwhile.

    Args:
        entries: an optimizer's state.
    """
    for parameter, own in entries.items():
        if isinstance(parameter, Tensor) and isinstance(own, MutableMapping):
            yield parameter, own

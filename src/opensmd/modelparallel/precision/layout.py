"""How plain PyTorch numbers an optimizer's parameters, of which a rank keeps some."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from opensmd.modelparallel.state import WrappedModel

__all__ = ["Layout"]


@dataclass
class Layout:
    """The whole optimizer's parameters, as plain PyTorch numbers them.

    Attributes:
        model: whose parameters they are.
        numbers: for every group, the numbers of all its parameters.
        names: for every group, the names that the script gave with its parameters, if it did.
        full_names: the module's name of every parameter, by number.
        shapes: the shape of every parameter, by number.
        local: the number of each parameter of this rank, by identity.
    """

    model: WrappedModel
    numbers: list[list[int]] = field(default_factory=list)
    names: list[list[str] | None] = field(default_factory=list)
    full_names: list[str] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    local: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many parameters the whole optimizer has."""
        return sum(map(len, self.numbers))

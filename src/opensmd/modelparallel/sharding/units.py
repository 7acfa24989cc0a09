"""Which modules' parameters are gathered together when a model is sharded; pure.

Blocks, the children of module lists and sequentials, are separate units: one is gathered while another
computes. What is outside all units belongs to the model's root, which is gathered for a whole step::

    GPT2LMHeadModel            root: embeddings, last norm, tied head
        transformer.h[0..n]    a unit each
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from torch import nn

__all__ = ["find_units", "kept_units"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


def find_units(
    module: nn.Module, *, least: int, most: int, left_out: Collection[int] = ()
) -> list[nn.Module]:
    """Return the units of ``module`` in the order of its modules, inner ones before outer ones.

    Args:
        least: the fewest elements of a unit.
        most: a unit with more elements is divided, if it contains blocks.
        left_out: ids of parameters that are not sharded.
    """
    most = min(most, max(1, _elements(module, left_out) // 4))
    search = _Search(least, most, set(left_out), _owner_counts(module))
    return list(search.inside(module))


def kept_units(elements: list[int], most: int) -> list[bool]:
    """Choose units to keep gathered from forward to backward, with at most ``most`` elements in total.

    Args:
        elements: of the units in forward order; the last ones are needed again first.
    """
    kept = []
    for number in reversed(elements):
        most -= number
        kept.append(most >= 0)
    return kept[::-1]


class _Search:
    def __init__(self, least: int, most: int, left_out: set[int], owners: Counter[int]) -> None:
        self._least = least
        self._most = most
        self._left_out = left_out
        self._owners = owners

    def inside(self, module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            elements = _elements(child, self._left_out)
            is_block = isinstance(module, _LISTS)
            inner = [] if is_block and elements <= self._most else list(self.inside(child))
            yield from inner
            if is_block and elements >= self._least and self._may_be_unit(child):
                yield child

    def _may_be_unit(self, module: nn.Module) -> bool:
        """Whether the module is called, and its parameters are not used outside it."""
        if isinstance(module, _WITHOUT_FORWARD):
            return False
        inside = _owner_counts(module)
        return all(self._owners[parameter] == count for parameter, count in inside.items())


def _owner_counts(module: nn.Module) -> Counter[int]:
    """Return in how many places in ``module`` each parameter is, by the parameter's id."""
    return Counter(
        id(parameter) for owner in module.modules() for parameter in owner.parameters(recurse=False)
    )


def _elements(module: nn.Module, left_out: Collection[int]) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in left_out)

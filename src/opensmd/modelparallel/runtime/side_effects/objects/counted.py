"""What the code of a class counts: sums of meters, which go on from microbatch to microbatch.

Microbatches may add to them in any order, so all have them in common.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

__all__ = ["added_to", "counted_by", "functions_in"]


@functools.lru_cache(maxsize=1024)
def counted_by(kind: Any) -> frozenset[str]:
    """Return the attributes to which the methods of an object's class add (``self.count += 1``)."""
    methods = [function for base in kind.__mro__ for function in functions_in(vars(base).values())]
    return frozenset(name for function in methods for name in added_to(function.__code__))


def added_to(code: CodeType) -> Iterator[str]:
    """Return the attributes and globals to which code adds."""
    adds = False
    for instruction in dis.get_instructions(code):
        if instruction.opname == "BINARY_OP":
            adds = instruction.argrepr in ("+=", "-=")
        elif instruction.opname in ("STORE_ATTR", "STORE_GLOBAL") and adds:
            yield instruction.argval
        elif instruction.opname != "SWAP":
            adds = False


def functions_in(values: Iterable[Any]) -> Iterator[FunctionType]:
    """Return the functions among the values of a class."""
    for value in values:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        candidates = (value.fget, value.fset) if isinstance(value, property) else (value,)
        yield from (each for each in candidates if isinstance(each, FunctionType))

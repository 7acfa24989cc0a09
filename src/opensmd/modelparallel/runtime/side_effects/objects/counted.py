"""What code sets, and what it counts: sums of meters, which go on from microbatch to microbatch.

Microbatches may add to these in any order, so all have them in common.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

__all__ = ["added_to", "carried_by", "counted_by", "functions_in", "stored_by"]


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


def carried_by(code: CodeType) -> Iterator[str]:
    """Return the attributes that code sets after a look at what they were (``most = max(most, now)``)."""
    read: set[Any] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            read.add(instruction.argval)
        elif instruction.opname == "STORE_ATTR" and instruction.argval in read:
            yield instruction.argval
        elif instruction.opname.startswith("STORE_") or instruction.opname == "POP_TOP":
            read.clear()  # the end of a statement


def stored_by(code: CodeType) -> Iterator[str]:
    """Return the names of attributes that code may set, of something other than ``self``."""
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and before not in ("self", ("self",)):
            yield instruction.argval
        # One instruction may load two variables.
        before = instruction.argval[-1:] if isinstance(instruction.argval, tuple) else instruction.argval
    if "setattr" in code.co_names:
        yield from (each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from stored_by(inner)


def functions_in(values: Iterable[Any]) -> Iterator[FunctionType]:
    """Return the functions among the values of a class."""
    for value in values:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        candidates = (value.fget, value.fset) if isinstance(value, property) else (value,)
        yield from (each for each in candidates if isinstance(each, FunctionType))

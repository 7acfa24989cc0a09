"""Tensors that hooks, or functions that modules return, carry out of modules, as the dry run shows them.

A module that lives on one rank runs there as a whole, with its hooks, and what these keep exists only there.
Hugging Face's models collect attentions this way, with hooks deep inside their blocks. If such a tensor is
used or returned outside modules that have not returned it, these must run piece by piece. So must one that
returns a function of its forward, which no other rank could find.

    step ── model ── block ── attention    a hook of attention keeps its second result
              │                            block returns without it
              └─ returns it                so block is to be opened, and model if the step returns it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opensmd.modelparallel.planning.trace import Escape
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.storages import StorageReference

__all__ = ["EscapeSearch", "Made"]

Path = tuple[str, ...]


@dataclass
class Made:
    """A tensor's storage: the unit that produced it, its number, and the calls in which it is visible.

    Attributes:
        level: the calls around it, outermost first; the code of the last one has it.
        hooks: the calls in which hooked modules took or returned it.
        given: the calls of modules that got it through a hook.
        derived: those of such calls in which it was computed from what a hook saw, perhaps by the hook.
    """

    storage: StorageReference
    unit: int
    number: int
    level: Path
    hooks: set[Path] = field(default_factory=set)
    given: set[Path] = field(default_factory=set)
    derived: set[Path] = field(default_factory=set)


class EscapeSearch:
    """Compares where tensors are used with where they are visible.

    Args:
        stack: the modules being called; changes while the model runs.
        made_by: returns what is known about a tensor.
    """

    def __init__(self, stack: list[str], made_by: Callable[[Tensor], Made | None]) -> None:
        self.found: set[Escape] = set()
        self._stack = stack
        self._made_by = made_by

    def entered(self, module: nn.Module, args: Any) -> None:
        """Note a call with ``args`` of ``module``, which is now the innermost of the stack."""
        if len(module._forward_pre_hooks) > 1:  # one belongs to the dry run
            for made in self._known(args):
                made.hooks.add(tuple(self._stack[:-1]))
                made.given.add(tuple(self._stack))

    def returned(self, module: nn.Module, args: Any, out: Any) -> None:
        """Note that ``module``, the innermost of the stack, returns ``out``."""
        results = self._known(out)
        caller = tuple(self._stack[:-1])
        if any(map(_is_of_a_call, tree_leaves(out))):
            self._add({tuple(self._stack)}, caller)
        for made in results:
            self._use(made)
            if len(made.level) > len(caller):
                made.level = caller
        if len(module._forward_hooks) > 1:  # one belongs to the dry run
            for made in (*results, *self._known(args)):
                made.hooks.add(caller)

    def operation(self, inputs: Sequence[Tensor], out: Any) -> None:
        """Note that an operation computed ``out`` from ``inputs``."""
        here = tuple(self._stack)
        derives = False
        for made in self._known(inputs):
            self._use(made)
            derives = derives or here in made.hooks or here in made.given or here in made.derived
        if derives:
            for made in self._known(out):
                made.derived.add(here)

    def result(self, value: Any) -> None:
        """Note that the step returns ``value``, perhaps from the model and perhaps from a hook."""
        for made in self._known(value):
            self._add(made.hooks, ())

    def _use(self, made: Made) -> None:
        here = tuple(self._stack)
        if (made.hooks or made.derived) and here[: len(made.level)] != made.level:
            self._add(made.hooks | made.derived, here)

    def _add(self, calls: set[Path], here: Path) -> None:
        for there in calls:
            common = 0
            while here[common : common + 1] == there[common : common + 1] != ():
                common += 1
            around = here[common - 1] if common else None
            inside = frozenset((*there[common:], *here[common:]))
            if inside:
                self.found.add(Escape(inside=inside, around=around))

    def _known(self, value: Any) -> Sequence[Made]:
        return [made for made in map(self._made_by, structure.tensors_in(value)) if made is not None]


def _is_of_a_call(value: Any) -> bool:
    """Whether this is a function that a call has made, and no name finds."""
    return isinstance(value, FunctionType) and "<" in value.__qualname__

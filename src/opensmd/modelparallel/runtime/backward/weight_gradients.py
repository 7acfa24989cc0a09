"""Weight gradients, which a rank computes when it has nothing better to do.

Nobody waits for them before the end of the step, while other ranks wait for the gradients of their outputs.
So backwards send those first, and the rest fills time in which a rank would be idle (as in zero-bubble
schedules, arXiv:2401.10241). What leads to no other rank can be left for later: half of the backward of
Linear layers and convolutions, and everything behind computed weights. All other functions compute the
gradients of their inputs and weights together, and do not run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from opensmd.modelparallel._torch_internals import any_autocast
from opensmd.modelparallel.function_modes._torch_internals import WithoutDefaultDevice
from opensmd.modelparallel.runtime.backward.inner_backwards import begins_backward
from opensmd.modelparallel.runtime.turns.record import Record
from opensmd.modelparallel.runtime.turns.thread_state import ThreadState, without_autocast
from opensmd.native import core
from opensmd.native.build import BuildError

__all__ = ["WeightGradients", "are_apart", "first_part"]


def first_part(
    roots: Sequence[Tensor], gradients: Sequence[Tensor], *, everything: bool
) -> core.SplitBackward | None:
    """Return a split backward, or None if nothing in it can wait.

    Args:
        everything: also leave what costs nothing, so that the first part adds to no gradient if
            ``leaves_everything`` says so.
    """
    try:
        return core.split_backward(roots, gradients, everything, begins_backward)
    except BuildError:  # already reported by the process group; its transport needs no core
        return None


def are_apart(legs: Sequence[Sequence[Tensor]], *, weights_too: bool) -> bool:
    """Whether backwards from each of ``legs`` are independent, so that they can run one by one.

    Args:
        weights_too: they must not even share a weight, whose gradient would then be added in two parts.
    """
    return core.are_apart(legs, weights_too)


class _Part(NamedTuple):
    """The second part of a backward, with the first's autocast; ``before`` must be called first."""

    split: core.SplitBackward
    state: ThreadState | None
    before: Callable[[], None] | None


class WeightGradients:
    """The second parts of one step's backwards.

    Args:
        record: notes what ran when.

    Attributes:
        left: those that can run at any time, as (microbatch, chunk).
    """

    def __init__(self, record: Record) -> None:
        self.left: list[tuple[int, int]] = []
        self._record = record
        self._parts: dict[tuple[int, int], _Part] = {}
        self._at_end: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def run_first(
        self,
        microbatch: int,
        chunk: int,
        split: core.SplitBackward,
        *,
        before_all: Callable[[], None] | None = None,
    ) -> None:
        """Run the first part of ``split`` and leave the second for later.

        Args:
            before_all: called before the second part, which then comes after all others.
        """
        with WithoutDefaultDevice():
            split.run_first()
        key = (microbatch, chunk)
        while key in self._parts:  # another backward of the same microbatch
            key = (microbatch, key[1] + 1)
        state = ThreadState.of_this_thread() if any_autocast() else None
        self._parts[key] = _Part(split, state, before_all)
        (self.left if before_all is None else self._at_end).append(key)

    def of(self, microbatch: int) -> list[int]:
        """Return the chunks in which a microbatch has left something."""
        return [chunk for index, chunk in self._parts if index == microbatch]

    def run(self, microbatch: int, chunk: int) -> None:
        """Compute the rest of one backward."""
        self.left.remove((microbatch, chunk))
        self._run(microbatch, chunk)

    def run_all(self) -> None:
        """Compute everything that is left."""
        while self.left:
            self.run(*self.left[0])
        while self._at_end:
            self._run(*self._at_end.pop(0))

    def _run(self, microbatch: int, chunk: int) -> None:
        split, state, before = self._parts.pop((microbatch, chunk))
        self._record.begin(microbatch, "weights")
        if before is not None:
            before()
        # The waiting thread may be in another microbatch's autocast.
        with without_autocast() if state is None else state.restored(), WithoutDefaultDevice():
            split.run_weights()
        self._record.end()

    def drop(self) -> None:
        """Drop what is left, because the step has failed."""
        self._parts.clear()  # each keeps a graph and its saved tensors
        self.left.clear()
        self._at_end.clear()

"""How tensors without data get their values: recorded operations on memory, some of which run later.

Nothing here knows modules or ranks. An operation refers to memory that other operations have created::

    memory M   empty(4096, 4096)   uniform_(M, -0.01, 0.01)   normal_(M, 0, 0.02)
                                   with the random state       with the random state
                                   that it found               that it found

The contents of M are what its operations write when they run in order, with the recorded random states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from opensmd.modelparallel.exceptions import SMPError

__all__ = ["Constant", "RecordedMemory", "RecordedOperation", "RandomState", "Reference", "values_of"]

# In place, with results that do not depend on the previous contents.
_OVERWRITING = {"uniform_", "normal_", "zero_", "fill_", "copy_", "exponential_", "bernoulli_"}
_numbers = itertools.count()


class RecordedMemory:
    """The memory of a tensor without data.

    Args:
        storage: of the meta tensor; kept, so that no other can be mistaken for it.
        device: where its data will be.

    Attributes:
        operations: those that create it and write into it, in order.
    """

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.storage = storage
        self.device = device
        self.operations: list[RecordedOperation] = []

    @property
    def key(self) -> int:
        """The key of meta tensors' storages in this memory."""
        key: int = self.storage._cdata
        return key

    def writers(self, before: float) -> Iterator[RecordedOperation]:
        """Return the operations that determine its contents before the operation of that number."""
        earlier = [operation for operation in self.operations if operation.number < before]
        starts = [index for index, operation in enumerate(earlier) if operation.overwrites(self)]
        yield from earlier[:1]
        yield from earlier[max(1, starts[-1] if starts else 1) :]


@dataclass(frozen=True)
class Reference:
    """A tensor in some memory."""

    memory: RecordedMemory
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def to(cls, tensor: Tensor, memory: RecordedMemory) -> Reference:
        """Return a reference to a meta tensor in ``memory``."""
        offset = int(tensor.storage_offset())
        return cls(memory, tensor.shape, tensor.stride(), offset, tensor.dtype)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor in real memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)

    @property
    def is_whole(self) -> bool:
        """Whether it covers all of its memory."""
        return self.size.numel() * self.dtype.itemsize == self.memory.storage.nbytes()


class Constant:
    """A tensor with data that an operation reads; it must not change before the operation runs."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version

    @property
    def tensor(self) -> Tensor:
        """The tensor.

        Raises:
            SMPError: the tensor has been changed since it was recorded.
        """
        if self._version is not None and self._tensor._version != self._version:
            raise SMPError(
                f"a tensor of shape {tuple(self._tensor.shape)}, from which delayed parameters are made, was "
                "changed before the first step made them; give them a copy of it"
            )
        return self._tensor


@dataclass
class RandomState:
    """A generator, and its state when an operation drew from it."""

    generator: torch.Generator
    state: Tensor

    def run(self, draw: Callable[[], Any]) -> Any:
        """Draw from that state again, and leave the generator as it is now."""
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            return draw()
        finally:
            self.generator.set_state(now)


@dataclass(eq=False)
class RecordedOperation:
    """One operation on tensors without data.

    Attributes:
        function, args, kwargs: the call, with references and constants for tensors.
        written: the memory that it changes.
        made: for each tensor of its result, a reference to its new memory, or None if it lies in existing
            memory.
        random: where it draws from.
        number: grows with each operation.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: Sequence[RecordedMemory] = ()
    made: Sequence[Reference | None] = ()
    random: RandomState | None = None
    number: int = field(default_factory=lambda: next(_numbers))

    def remember(self) -> None:
        """Add this operation to the memory that it creates or changes."""
        for memory in {*self.written, *(made.memory for made in self.made if made is not None)}:
            memory.operations.append(self)

    def overwrites(self, memory: RecordedMemory) -> bool:
        """Whether it overwrites all previous contents of ``memory``."""
        if self.function.overloadpacket.__name__ not in _OVERWRITING or not self.args:
            return False
        target = self.args[0]
        return isinstance(target, Reference) and target.memory is memory and target.is_whole

    def reads(self) -> Iterator[RecordedMemory]:
        """Return the memory that it reads."""
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Reference) and not self.overwrites(leaf.memory):
                yield leaf.memory

    def run(
        self, values: MutableMapping[RecordedMemory, torch.UntypedStorage], *, draws_on: bool = False
    ) -> None:
        """Run on real memory; put new memory into ``values``.

        Args:
            draws_on: the generator is already in the recorded state, and may advance.
        """

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Reference):
                return leaf.on(values[leaf.memory])
            return leaf.tensor if isinstance(leaf, Constant) else leaf

        args, kwargs = tree_map(real, (self.args, self.kwargs))
        if self.random is None or draws_on:
            result = self.function(*args, **kwargs)
        else:
            result = self.random.run(lambda: self.function(*args, **kwargs))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            raise SMPError(
                f"{self.function}, by which delayed parameters are made, was given a tensor of the meta "
                "device, whose values nobody knows"
            )
        for tensor, made in zip(tensors, self.made, strict=True):
            if made is not None:
                values[made.memory] = _laid_out(tensor, made)


def values_of(
    wanted: Sequence[RecordedMemory], *, before: float = float("inf")
) -> dict[RecordedMemory, torch.UntypedStorage]:
    """Run only the operations that determine the contents of ``wanted``.

    Args:
        wanted: memory.
        before: return the contents before the operation of that number.
    """
    chosen: dict[int, RecordedOperation] = {}
    needed = [(memory, before) for memory in wanted]
    while needed:
        memory, until = needed.pop()
        for operation in memory.writers(until):
            if operation.number not in chosen:
                chosen[operation.number] = operation
                needed += [(read, operation.number) for read in operation.reads()]
    values: dict[RecordedMemory, torch.UntypedStorage] = {}
    with torch.no_grad():
        for _, operation in sorted(chosen.items()):
            operation.run(values)
    return {memory: values[memory] for memory in wanted}


def _laid_out(tensor: Tensor, made: Reference) -> torch.UntypedStorage:
    """Return the memory of ``tensor`` with the strides of its meta counterpart."""
    storage = tensor.untyped_storage()
    if tensor.stride() == made.stride and storage.nbytes() == made.memory.storage.nbytes():
        return storage
    again = torch.empty_strided(made.size, made.stride, dtype=made.dtype, device=tensor.device)
    again.copy_(tensor)
    return again.untyped_storage()

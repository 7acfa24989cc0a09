"""A mode in which tensors are created without data, and operations on them are recorded.

Factories make meta tensors, and operations on these are recorded with their memory. Random operations also
run, on memory that is discarded, so that the generator advances as usual and later draws are unaffected.
Whatever needs values (``item()``) gets them; those of the last few random operations are kept for that,
because initializers that reject samples ask after each one.

Some code skips meta tensors (torch's own initializers do). To prevent that, they report the device where
their data will be.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from opensmd.modelparallel.delayed._torch_internals import become, without_modes
from opensmd.modelparallel.delayed.tape import (
    Constant,
    RandomState,
    RecordedMemory,
    RecordedOperation,
    Reference,
    values_of,
)
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.side_effects.written import written_by_operation
from opensmd.modelparallel.runtime.tensors.functions import getter, setter

__all__ = ["Disguise", "Recording"]

# Less than a page is not worth a delay, and code that builds models computes with small tensors.
SMALL_BYTES = 4096
KEPT = 8
_META = torch.device("meta")
_NEEDS_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """While active, new tensors of more than a page have no data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paused = False
        self._memory: dict[int, RecordedMemory] = {}
        self._kept: OrderedDict[RecordedMemory, torch.UntypedStorage] = OrderedDict()  # current contents

    def know(self, memory: RecordedMemory) -> None:
        """Continue recording operations on memory of an earlier recording."""
        self._memory[memory.key] = memory

    def reference(self, tensor: Tensor) -> Reference | None:
        """Return the reference to a tensor without data."""
        if not tensor.is_meta or tensor.layout is not torch.strided:
            return None
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        return None if memory is None else Reference.to(tensor, memory)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(self.reference(tensor) is not None for tensor in tensors):
            return self._on_memory(func, args, kwargs)
        if tensors or self.paused or not any(arg.name == "device" for arg in func._schema.arguments):
            return func(*args, **kwargs)
        return self._made(func, args, kwargs)

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a factory: a tensor without data, unless it is small."""
        device = torch.device(kwargs.get("device") or "cpu")
        # from torch's own code, for the right side of tensor[...] = 1 if the tensor is on the meta device
        is_right_side = func is torch.ops.aten.scalar_tensor.default and device == _META
        if is_right_side:
            device = torch.device("cpu")
            kwargs = {**kwargs, "device": device}
        elif device == _META:
            return func(*args, **kwargs)
        result = func(*args, **_on_meta(kwargs))
        if not isinstance(result, Tensor) or result.layout is not torch.strided:
            return func(*args, **kwargs)
        if result.nbytes < SMALL_BYTES and not is_right_side:
            return func(*args, **kwargs)
        random = _random_state(func, kwargs, device)
        operation = self._record(func, args, kwargs, result, device, random)
        if operation is not None:
            self._follow(operation)
        return result

    def _on_memory(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on tensors without data."""
        written = [self.reference(tensor) for tensor in written_by_operation(func, args, kwargs)]
        if None in written or not _NEEDS_NUMBERS.isdisjoint(func.tags):
            return self._computed(func, args, kwargs)
        device = self._device(args, kwargs)
        try:
            result = func(*tree_map(_to_meta, args), **_on_meta(tree_map(_to_meta, kwargs)))
        except NotImplementedError:  # torch cannot tell the shape of the result
            if written:
                raise
            return self._computed(func, args, kwargs)
        random = _random_state(func, kwargs, device)
        if (operation := self._record(func, args, kwargs, result, device, random)) is not None:
            self._follow(operation)
        return result

    def _follow(self, operation: RecordedOperation) -> None:
        """Run random operations, and those on memory with known contents; forget outdated contents."""
        touched = {*operation.reads(), *operation.written}
        if operation.random is not None:
            for memory in touched - self._kept.keys():
                if operation.overwrites(memory):
                    size = memory.storage.nbytes()
                    scratch = torch.empty(size, dtype=torch.uint8, device=memory.device)
                    self._kept[memory] = scratch.untyped_storage()
                else:
                    self._kept[memory] = values_of([memory], before=operation.number)[memory]
            self._run(operation)
        elif touched and touched <= self._kept.keys():
            self._run(operation)
        else:
            for memory in operation.written:
                self._kept.pop(memory, None)

    def _run(self, operation: RecordedOperation) -> None:
        with torch.no_grad():
            operation.run(self._kept, draws_on=True)
        for memory in operation.written:
            self._kept.move_to_end(memory)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        device: torch.device,
        random: RandomState | None,
    ) -> RecordedOperation | None:
        """Record an operation, unless it is a view."""
        written = [self.reference(tensor) for tensor in written_by_operation(func, args, kwargs)]
        given, named = tree_map(self._recorded, (args, kwargs))
        made = [self._new(leaf, device) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not (any(made) or written):
            return None
        memory = list(dict.fromkeys(reference.memory for reference in written if reference is not None))
        operation = RecordedOperation(func, given, named, written=memory, made=made, random=random)
        operation.remember()
        return operation

    def _new(self, result: Tensor, device: torch.device) -> Reference | None:
        """Return a reference to a result in new memory; None if it lies in existing memory."""
        if self.reference(result) is not None or not result.is_meta:
            return None
        memory = RecordedMemory(result.untyped_storage(), device)
        self._memory[memory.key] = memory
        return Reference.to(result, memory)

    def _recorded(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        reference = self.reference(leaf)
        if reference is not None:
            return reference
        return Constant(leaf.detach().clone() if leaf.nbytes < SMALL_BYTES else leaf.detach())

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the operation's real result.

        Raises:
            SMPError: it would write into memory without data.
        """
        written = written_by_operation(func, args, kwargs)
        if any(self.reference(tensor) is not None for tensor in written):
            raise SMPError(
                f"{func} needs the numbers of parameters whose initialization is delayed; make this module "
                "under smp.delay_param_initialization(enabled=False)"
            )

        def real(leaf: Any) -> Any:
            reference = self.reference(leaf) if isinstance(leaf, Tensor) else None
            return leaf if reference is None else self._filled(reference)

        args, kwargs = tree_map(real, (args, kwargs))
        return func(*args, **kwargs)

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """Return the values that a tensor without data would have now; None if it has data."""
        reference = self.reference(tensor)
        if reference is None:
            return None
        with without_modes():
            return self._filled(reference).clone().requires_grad_(tensor.requires_grad)

    def _filled(self, reference: Reference) -> Tensor:
        known = self._kept.get(reference.memory)
        return reference.on(values_of([reference.memory])[reference.memory] if known is None else known)

    def _device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        """Return the device of the result."""
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"])
        references = [
            self.reference(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        ]
        return next(reference.memory.device for reference in references if reference is not None)


class Disguise(TorchFunctionMode):
    """Makes tensors without data report their future device, and show their values on request."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _WHERE:
            reference = self._recording.reference(args[0])
            if reference is not None:
                return _WHERE[func](reference.memory.device)
        if func in _INDEXING and self._recording.reference(args[0]) is not None:
            args = (args[0], _with_numbers(args[1]), *args[2:])
        if func == _SET_DATA and self._is_otherwise(*args):
            become(*args)
            return None
        if func in _OUTSIDE_TORCH and (copy := self._recording.copy_of(args[0])) is not None:
            numbers = func(copy, *args[1:], **(kwargs or {}))
            if isinstance(numbers, np.ndarray):
                numbers.flags.writeable = False  # writes into a copy would be lost
            return numbers
        return func(*args, **(kwargs or {}))

    def _is_otherwise(self, parameter: Tensor, data: Tensor) -> bool:
        """Whether one of them has data and the other has not, which torch could not put into it."""
        reference = self._recording.reference
        return isinstance(parameter, nn.Parameter) and (reference(parameter) is None) != (
            reference(data) is None
        )


_SET_DATA = setter("data")
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
# What passes values to Python and NumPy without a visible operation.
_OUTSIDE_TORCH = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_WHERE: dict[Any, Callable[[torch.device], Any]] = {
    getter("device"): lambda device: device,
    getter("is_meta"): lambda device: False,
    getter("is_cpu"): lambda device: device.type == "cpu",
    getter("is_cuda"): lambda device: device.type == "cuda",
}


def _with_numbers(index: Any) -> Any:
    """Return an index in which lists are tensors: torch would make these where there is no data."""
    if isinstance(index, tuple):
        return tuple(map(_with_numbers, index))
    return torch.as_tensor(index) if isinstance(index, (list, np.ndarray)) else index


def _random_state(func: Any, kwargs: dict[str, Any], device: torch.device) -> RandomState | None:
    """Return the generator of a random operation; None for others."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator")
    if generator is None:
        generator = _default_generator(device)
    return RandomState(generator, generator.get_state())


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keywords for the same operation on the meta device, which draws nothing."""
    changed: dict[str, Callable[[Any], Any]] = {
        "device": lambda _: _META,
        "generator": lambda _: None,
        "pin_memory": lambda _: False,
    }
    return {name: changed[name](value) if name in changed else value for name, value in kwargs.items()}


def _to_meta(leaf: Any) -> Any:
    return leaf.to(_META) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf

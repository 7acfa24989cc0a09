"""Runs that leave a model unchanged: changes to attributes, buffers and parameters are undone.

So are writes into their inputs, because the following step gets the same ones.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from opensmd.modelparallel._torch_internals import without_modes
from opensmd.modelparallel.runtime.side_effects.containers import (
    Content,
    containers_in,
    content_of,
    set_content,
)
from opensmd.modelparallel.runtime.side_effects.objects.registry import Objects
from opensmd.modelparallel.runtime.side_effects.random_numbers.own_generators import ways_back
from opensmd.modelparallel.runtime.side_effects.written import written_by_operation
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.storages import has_storage, lies_in

__all__ = ["KeptModel", "WrittenTensors", "untouched"]


class WrittenTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Copies a parameter or input before the first operation that writes into it.

    Few programs do that (a moving average of weights in the forward, a batch that is normalized in place), so
    copying everything would be wasteful.

    Args:
        module: the parameters' module.
        call: what is run; its inputs are those that a ``functools.partial`` holds.
    """

    def __init__(self, module: nn.Module, call: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        inputs = structure.tensors_in((call.args, call.keywords)) if isinstance(call, partial) else []
        self._tensors: dict[int, list[Tensor]] = defaultdict(list)
        for tensor in (*module.parameters(), *inputs):
            if has_storage(tensor):
                self._tensors[_memory(tensor)].append(tensor)
        self._memory = frozenset(self._tensors)
        self._kept: dict[int, list[Tensor]] = {}

    @property
    def found(self) -> bool:
        """Whether there was such an operation."""
        return bool(self._kept)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for written in written_by_operation(func, args, kwargs):
            self._keep(written)
        return func(*args, **kwargs)

    def _keep(self, written: Tensor) -> None:
        if lies_in(written, self._memory):
            memory = _memory(written)
            if memory not in self._kept:
                with without_modes():  # a copy of the data, even under fake tensors
                    self._kept[memory] = [tensor.detach().clone() for tensor in self._tensors[memory]]

    def put_back(self) -> None:
        """Restore the original values of all."""
        with torch.no_grad():
            for memory, kept in self._kept.items():
                for tensor, numbers in zip(self._tensors[memory], kept, strict=True):
                    tensor.copy_(numbers)


class KeptModel:
    """A snapshot of what a run may change in a model, except values of parameters.

    Args:
        module: the model.
        parameters: those with data.
        buffers: likewise.
    """

    def __init__(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor]
    ) -> None:
        self._attributes = [(submodule, dict(submodule.__dict__)) for submodule in module.modules()]
        values = [value for _, kept in self._attributes for value in kept.values()]
        values += [value for parameter in parameters for value in vars(parameter).values()]
        self._holders = [(each, dict(vars(each))) for each in _holders_of_tensors(values)]
        names = {submodule: name for name, submodule in module.named_modules()}
        self._objects = [(each, dict(each.values)) for each in Objects(names, split=())]
        values += [value for _, kept in self._objects for value in kept.values()]
        self._contents = [(each, content_of(each)) for value in values for each in containers_in(value)]
        inside = [value for _, content in self._contents for value in _values(content)]
        self._generators = ways_back([*values, *inside])
        self._parameters = [(weight, weight.grad, weight.requires_grad) for weight in parameters]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._data = [(each, each.data) for each in (*parameters, *buffers) if has_storage(each)]

    def put_back(self) -> None:
        """Restore everything from the snapshot."""
        for submodule, kept in self._attributes:
            submodule.__dict__.clear()
            submodule.__dict__.update(kept)
        for holder, kept in self._holders:
            vars(holder).clear()
            vars(holder).update(kept)
        for each, kept in self._objects:
            each.replace(kept)
        for container, content in self._contents:
            set_content(container, content)
        for back in self._generators:
            back()
        for tensor, kept_tensor in self._data:
            if _memory(tensor) != _memory(kept_tensor):  # tensor.data = ..., perhaps a fake
                tensor.data = kept_tensor
        for parameter, gradient, trained in self._parameters:
            parameter.grad = gradient
            parameter.requires_grad_(trained)
        with torch.no_grad():
            for buffer, kept_data in self._buffers:
                if buffer.shape != kept_data.shape:  # quantisation observers size theirs in the first forward
                    buffer.resize_(kept_data.shape)
                buffer.copy_(kept_data)


@contextlib.contextmanager
def untouched(module: nn.Module, written: WrittenTensors | None) -> Iterator[None]:
    """Undo whatever the body changes in the model.

    Args:
        written: sees what is written into parameters and inputs; None if nothing is.
    """
    parameters = list(module.parameters())
    kept = KeptModel(module, parameters, list(module.buffers()))
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        kept.put_back()
        if written is not None:
            written.put_back()


def _holders_of_tensors(values: Iterable[Any]) -> list[Any]:
    """Return the objects that have tensors as attributes, such as bitsandbytes' states of quantized weights.

    A forward may write there what it computes from its weights, which in the run are fakes.
    """
    others = (Tensor, nn.Module, type, ModuleType)
    held = {id(value): value for value in values if not isinstance(value, others)}
    return [
        value
        for value in held.values()
        if any(isinstance(each, Tensor) for each in getattr(value, "__dict__", {}).values())
    ]


def _values(content: Content) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content


def _memory(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place

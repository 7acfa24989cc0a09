"""Parameters without data, from the end of the context that created them to the first step.

Inside the context they are meta tensors that record themselves. After it nothing records, so they must not
change: they become tensors that refuse to be read or written, like those of other ranks, and that show their
future device. ``smp.DistributedModel`` turns them back into meta tensors while it distributes and converts
modules. When the plan is known, each rank fills what lives there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from opensmd.modelparallel.delayed._torch_internals import become
from opensmd.modelparallel.delayed.recording import Disguise, Recording
from opensmd.modelparallel.delayed.tape import RecordedMemory, Reference, values_of
from opensmd.modelparallel.runtime.tensors.placeholder import RemoteTensor, emptied

__all__ = ["DelayedParameter", "DelayedParameters", "goes_on", "records_modules"]

_ORIGIN = "_opensmd_origin"


class DelayedTensor(RemoteTensor):
    """A tensor without data until the first step."""

    _why_not = (
        "whose initialization is delayed until the first call of a smp.step function. Initialize it inside "
        "smp.delay_param_initialization or smp.model_creation, load values with the DistributedModel's "
        "load_state_dict, or change it in model.register_post_partition_hook"
    )


class DelayedParameter(DelayedTensor, nn.Parameter):
    """A parameter whose initialization waits for the first step."""

    _no_parameter = DelayedTensor


class DelayedParameters:
    """A model's parameters without data.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._filled = False

    def __bool__(self) -> bool:
        return bool(self._parameters)

    @property
    def _parameters(self) -> list[DelayedParameter]:
        # looked up late: the model may be wrapped inside the context, whose end delays them
        return [] if self._filled else _delayed(self._module.parameters())

    @contextlib.contextmanager
    def planned(self) -> Iterator[None]:
        """Make them look ordinary for a dry run with fake tensors, which needs only shapes."""
        parameters = self._parameters
        for parameter in parameters:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.__class__ = DelayedParameter

    def move(self, device: torch.device) -> None:
        """Put their data on ``device`` when they get it."""
        for parameter in self._parameters:
            origin: Reference = parameter.__dict__[_ORIGIN]
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            become(parameter, emptied(origin.size, origin.stride, origin.dtype, device))
            parameter.__class__ = DelayedParameter

    def fill(self, is_here: Callable[[nn.Parameter], bool]) -> None:
        """Fill those that live here, one by one; the others stay empty."""
        self._fill(self._parameters, is_here)
        self._filled = True

    def fill_some(self, parameters: Iterable[nn.Parameter]) -> None:
        """Fill those of ``parameters`` that have no data; all others keep waiting."""
        self._fill(_delayed(parameters), lambda _: True)

    @staticmethod
    def _fill(parameters: Iterable[DelayedParameter], is_here: Callable[[nn.Parameter], bool]) -> None:
        for parameter in parameters:
            origin: Reference = parameter.__dict__.pop(_ORIGIN)
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            if is_here(parameter):
                parameter.data = origin.on(values_of([origin.memory])[origin.memory]).to(parameter.device)


@contextlib.contextmanager
def records_modules(recording: Recording) -> Iterator[None]:
    """Record the creation of modules; at the end, delay their parameters and fill everything else."""
    modules: dict[int, nn.Module] = {}

    def note(module: nn.Module, name: str, what: Any) -> None:
        for candidate in (module, what):
            if isinstance(candidate, nn.Module):
                modules[id(candidate)] = candidate

    hooks = (
        register_module_parameter_registration_hook(note),
        register_module_module_registration_hook(note),
        register_module_buffer_registration_hook(note),
    )
    try:
        with recording, Disguise(recording):
            yield
    finally:
        for hook in hooks:
            hook.remove()
    delay(recording, modules.values())


@contextlib.contextmanager
def goes_on(module: nn.Module) -> Iterator[nn.Module]:
    """Record changes of a model with delayed parameters; do nothing for other models.

    Yields:
        A module to which to add a new root of the model, if there is one.
    """
    root = nn.Module()
    parameters = _delayed(module.parameters())
    if not parameters:
        yield root
        return
    recording = Recording()
    for parameter in parameters:
        origin: Reference = parameter.__dict__.pop(_ORIGIN)
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        recording.know(origin.memory)
        become(parameter, origin.on(origin.memory.storage))
    with records_modules(recording):
        root.add_module("given", module)
        yield root


def delay(recording: Recording, roots: Iterable[nn.Module]) -> None:
    """Make parameters without data refuse access, and fill buffers and other tensors of modules."""
    modules = {id(module): module for root in roots for module in root.modules()}.values()
    shared: dict[RecordedMemory, torch.UntypedStorage] = {}  # memory that already has its values
    filled: dict[int, Tensor] = {}
    for module in modules:
        for table in (module._buffers, module.__dict__):
            for name, value in list(table.items()):
                if isinstance(value, Tensor) and recording.reference(value) is not None:
                    if id(value) not in filled:
                        filled[id(value)] = _filled(recording, value, shared)
                    table[name] = filled[id(value)]
    for memory, parameters in _by_memory(recording, modules).items():
        for parameter in parameters.values():
            if len(parameters) > 1 or memory in shared:  # views of one memory must keep sharing it
                become(parameter, _filled(recording, parameter, shared))
            else:
                _delay(recording, parameter)


def _by_memory(
    recording: Recording, modules: Iterable[nn.Module]
) -> dict[RecordedMemory, dict[int, nn.Parameter]]:
    """Return the parameters without data in each memory, by id."""
    by_memory: dict[RecordedMemory, dict[int, nn.Parameter]] = {}
    for module in modules:
        for parameter in module._parameters.values():
            origin = None if parameter is None else recording.reference(parameter)
            if origin is not None and parameter is not None:
                by_memory.setdefault(origin.memory, {})[id(parameter)] = parameter
    return by_memory


def _filled(
    recording: Recording, tensor: Tensor, shared: dict[RecordedMemory, torch.UntypedStorage]
) -> Tensor:
    origin = recording.reference(tensor)
    assert origin is not None
    if origin.memory not in shared:
        shared[origin.memory] = values_of([origin.memory])[origin.memory]
    return origin.on(shared[origin.memory])


def _delay(recording: Recording, parameter: nn.Parameter) -> None:
    origin = recording.reference(parameter)
    assert origin is not None
    become(parameter, emptied(origin.size, origin.stride, origin.dtype, origin.memory.device))
    parameter.__class__ = DelayedParameter
    parameter.__dict__[_ORIGIN] = origin


def _delayed(parameters: Iterable[nn.Parameter]) -> list[DelayedParameter]:
    return [parameter for parameter in parameters if isinstance(parameter, DelayedParameter)]

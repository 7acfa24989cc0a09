"""The structure of a model before anything has run: names, owners, sizes, and which modules can be split."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from opensmd.modelparallel._torch_internals import has_backward_hooks, is_returned_by_compile, watchers
from opensmd.modelparallel.dry_run.split_blocks import split_blocks
from opensmd.modelparallel.planning.costs.cpu.sizes import size_of
from opensmd.modelparallel.planning.plan import ancestors
from opensmd.modelparallel.planning.trace import Edge, ModelTrace, ModuleInfo, Unit
from opensmd.modelparallel.runtime.tensors.storages import overlapping

__all__ = ["ModuleTree", "describe", "followed"]


def followed(module: nn.Module) -> dict[nn.Module, str]:
    """Return the modules whose calls are watched, with their names, for timing a step elsewhere."""
    return ModuleTree(module).followed()


def describe(module: nn.Module) -> ModelTrace:
    """Describe the model's tree without a run: a unit per module with parameters, with sizes but no times.

    A block split by torch's own tensor parallelism is one unit, and so are compiled and scripted modules.
    """
    tree = ModuleTree(module)
    infos = tree.infos({}, {})
    with_parameters = [name for name, info in infos.items() if info.parameters]
    whole = split_blocks(module) | {name for name, info in infos.items() if info.opaque}
    unit_of = {
        name: next((ancestor for ancestor in reversed((name, *ancestors(name))) if ancestor in whole), name)
        for name in with_parameters
    }
    numbers = {unit: index for index, unit in enumerate(dict.fromkeys(unit_of.values()))}
    units = tuple(Unit(module=name) for name in numbers) or (Unit(module=""),)
    return ModelTrace(
        modules=infos,
        units=units,
        edges=tuple(Edge(source=i, target=i + 1, bytes=0, tensor=i) for i in range(len(units) - 1)),
        aliases=tree.aliases,
        uses={name: numbers[unit] for name, unit in unit_of.items()},
        shared=tree.shared,
    )


class ModuleTree:
    """Names, owners and sizes of a model's modules."""

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[nn.Module, str] = {}
        self.aliases: dict[str, str] = {}
        for name, submodule in module.named_modules(remove_duplicate=False):
            if submodule in self.names:
                self.aliases[name] = self.names[submodule]
            else:
                self.names[submodule] = name
        self._shared_modules = frozenset(self.aliases.values())
        self.owners: dict[int, list[str]] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        full_names: dict[str, nn.Parameter] = {}
        for key, name in self.names.items():
            for own, parameter in key._parameters.items():
                if parameter is None:
                    continue
                if nn.parameter.is_lazy(parameter):
                    raise ValueError(
                        f"parameter {own!r} of module {name!r} is lazy and has no shape yet; run the model "
                        "once on a sample before wrapping it in smp.DistributedModel"
                    )
                self.parameters[id(parameter)] = parameter
                self.owners.setdefault(id(parameter), []).append(name)
                full_names[f"{name}.{own}" if name else own] = parameter
            for buffer in key._buffers.values():
                if buffer is not None:
                    self.owners.setdefault(id(buffer), []).append(name)
        self.first_names = {id(key): name for name, key in reversed(full_names.items())}
        self.shared = _shared(full_names)
        first = next(module.parameters(), None)
        self.device = first.device if first is not None else torch.device("cpu")

    def followed(self, whole: Collection[str] = ()) -> dict[nn.Module, str]:
        """Return the modules whose calls are watched: all except those inside modules that cannot be split.

        ``whole`` are modules that a run has shown to be unsplittable.
        """
        opaque = {name for module, name in self.names.items() if _is_opaque(module)} | set(whole)
        return {
            module: name
            for module, name in self.names.items()
            if opaque.isdisjoint(ancestors(name)) and not self._is_everywhere(module, name)
        }

    def _is_everywhere(self, module: nn.Module, name: str) -> bool:
        """Whether modules share one of torch's that computes with its arguments alone."""
        return (
            name in self._shared_modules
            and type(module).__module__.startswith("torch.nn.modules.")
            and not (module._parameters or module._buffers or module._modules)
            and not ("forward" in module.__dict__ or watchers(module) or has_backward_hooks(module))
        )

    def infos(self, operations: dict[str, int], calls: dict[str, int]) -> dict[str, ModuleInfo]:
        """Return the trace's information about each module; a shared tensor counts for its first owner."""
        seen: set[int] = set()
        found = {}
        for module, name in self.names.items():
            own = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
            seen.update(map(id, own))
            buffers = [b for b in module._buffers.values() if b is not None and id(b) not in seen]
            seen.update(map(id, buffers))
            everywhere = self._is_everywhere(module, name)
            found[name] = ModuleInfo(
                name=name,
                kind=type(module).__name__,
                parameters=sum(p.numel() for p in own),
                parameter_bytes=sum(size_of(p) for p in own),
                trainable_bytes=sum(size_of(p) for p in own if p.requires_grad),
                buffer_bytes=sum(size_of(b) for b in buffers),
                calls=calls.get(name, 0),
                operations=operations.get(name, 0),
                opaque=_is_opaque(module),
                container=everywhere or _is_container(module) or _is_opened(module, name, calls),
                everywhere=everywhere,
            )
        return found


def _is_opaque(module: nn.Module) -> bool:
    """Whether a module runs as a whole because it is compiled or scripted."""
    return isinstance(module, torch.jit.ScriptModule) or is_returned_by_compile(module)


def _is_container(module: nn.Module) -> bool:
    """Whether a module cannot be called: lists and dicts of modules, and others without a forward."""
    if _is_opaque(module) or "forward" in module.__dict__:
        return False
    return type(module).forward is nn.Module.forward


def _is_opened(module: nn.Module, name: str, calls: dict[str, int]) -> bool:
    """Whether others call a module's children instead of the module, as checkpoints of layers do."""
    if not calls or calls.get(name) or not name or _is_opaque(module):
        return False
    if any(True for _ in module.parameters(recurse=False)) or any(
        True for _ in module.buffers(recurse=False)
    ):
        return False
    return any(calls.get(f"{name}.{child}") for child, _ in module.named_modules() if child)


def _shared(parameters: Mapping[str, nn.Parameter]) -> tuple[tuple[str, ...], ...]:
    """Return names of parameters that are one, or share memory, as after ``assign=True``."""
    one_of = overlapping(parameters.values())
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(one_of[id(parameter)], []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)

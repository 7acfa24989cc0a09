"""One dry run of the user's step function, to learn the model's shape for the partitioner.

The run uses fake tensors: nothing is computed and nothing allocated. Where the script wants a value
(``.item()``) or an operation has no fake form, the step runs once for real instead. Either way the model is
left as it was: gradients, parameters, buffers, attributes and random state are put back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from opensmd.modelparallel._torch_internals import backward_left_out
from opensmd.modelparallel.compatibility.quirks import forget_fake_results
from opensmd.modelparallel.dry_run._torch_internals import own_parametrization_cache
from opensmd.modelparallel.dry_run.observer import Clock, Observer
from opensmd.modelparallel.dry_run.restoring import WrittenParameters, untouched
from opensmd.modelparallel.dry_run.split_blocks import split_blocks
from opensmd.modelparallel.dry_run.unseen_work import outweighs
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.cost import accumulation_seconds
from opensmd.modelparallel.planning.plan import ancestors
from opensmd.modelparallel.planning.trace import Edge, ModelTrace, ModuleInfo, Reuse, Unit
from opensmd.modelparallel.precision._torch_internals import scales_made_for_real
from opensmd.modelparallel.runtime.tensors.storages import overlapping

__all__ = ["capture", "describe", "followed", "is_tracing"]

logger = logging.getLogger("opensmd.modelparallel")
_local = threading.local()
# what the backward of work takes of which only a forward's measured seconds are known
BACKWARD_OF_FORWARD = 2.0
_TORCH = str(Path(torch.__file__).parent)


def is_tracing() -> bool:
    """Whether this thread is in the dry run that precedes partitioning (``smp.is_tracing``)."""
    return getattr(_local, "depth", 0) > 0


def capture(
    module: nn.Module,
    call: Callable[[], Any],
    *,
    device: torch.device | None = None,
    times: bool = False,
    memory: bool = False,
    has_data: bool = True,
) -> ModelTrace:
    """Run ``call`` once and report what ``module`` did in it.

    Args:
        module: the model; its parameters must be real on this rank.
        call: the user's step function with one microbatch's arguments. It calls ``module``; backwards in it
            do nothing.
        device: where a timed run takes place; the device of the parameters by default.
        times: measure forward times in two more, real runs (``trace_execution_times``).
        memory: see what is kept for backward in a real run instead of a fake one (``trace_memory_usage``).
        has_data: False if parameters have no data yet: no real run takes place, whoever asks for one.

    Returns:
        The trace. If ``call`` never called the model, its units are the modules with parameters, sizes only.

    Raises:
        ValueError: the model has lazy modules that have not seen data yet.
        Exception: whatever ``call`` raises in the real run; and in the fake one, if not because of the fakes.
    """
    tree = _Tree(module)
    names = tree.followed()
    if not has_data:
        return _capture_without_data(module, call, tree, names, asked=times or memory)
    observer = _observe(module, call, tree, names, memory=memory)
    if observer.position.transforming:  # torch.func's transforms see what runs inside them alone
        names = tree.followed(observer.position.transforming)
        observer = _observe(module, call, tree, names, memory=memory)
    if not observer.position.entered:
        logger.warning("the step function did not call the model; it is partitioned by parameter sizes alone")
        return describe(module)
    device = device or tree.device
    if times:
        return _trace(tree, observer, _measure(module, call, names, device))
    return _trace(tree, observer, _measure_if_doubtful(module, call, observer, names, device))


def _capture_without_data(
    module: nn.Module, call: Callable[[], Any], tree: _Tree, names: dict[nn.Module, str], *, asked: bool
) -> ModelTrace:
    """What fake tensors show of ``call``; if that is nothing, sizes alone."""
    if asked:
        logger.warning(
            "trace_execution_times and trace_memory_usage are ignored: the parameters' initialization is "
            "delayed until there is a plan, so nothing can be measured before"
        )
    observer = _observe_fake_unless_impossible(module, call, tree, names)
    if observer is not None and observer.position.transforming:
        names = tree.followed(observer.position.transforming)
        observer = _observe_fake_unless_impossible(module, call, tree, names)
    if observer is None or not observer.position.entered:
        logger.warning(
            "the step function cannot run under fake tensors, and parameters' initialization is delayed, so "
            "the model is partitioned by parameter sizes alone"
        )
        return describe(module)
    return _trace(tree, observer, None)


def followed(module: nn.Module) -> dict[nn.Module, str]:
    """The modules whose calls are watched, with their names, for those who time a step themselves."""
    return _Tree(module).followed()


def describe(module: nn.Module) -> ModelTrace:
    """The model's tree without a run: a unit for each module that has parameters, with sizes and no times.

    A block that torch's own tensor parallelism has split is one unit.
    """
    tree = _Tree(module)
    with_parameters = [name for name, info in tree.infos({}, {}).items() if info.parameters]
    blocks = split_blocks(module)
    unit_of = {
        name: next((ancestor for ancestor in reversed((name, *ancestors(name))) if ancestor in blocks), name)
        for name in with_parameters
    }
    numbers = {unit: index for index, unit in enumerate(dict.fromkeys(unit_of.values()))}
    units = tuple(Unit(module=name) for name in numbers) or (Unit(module=""),)
    return ModelTrace(
        modules=tree.infos({}, {}),
        units=units,
        edges=tuple(Edge(source=i, target=i + 1, bytes=0, tensor=i) for i in range(len(units) - 1)),
        aliases=tree.aliases,
        uses={name: numbers[unit] for name, unit in unit_of.items()},
        shared=tree.shared,
    )


class _Tree:
    """Names, owners and sizes of a model's modules."""

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[nn.Module, str] = {}
        self.aliases: dict[str, str] = {}
        for name, submodule in module.named_modules(remove_duplicate=False):
            if submodule in self.names:
                self.aliases[name] = self.names[submodule]
            else:
                self.names[submodule] = name
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
        """The modules whose calls are watched: all but those inside modules that cannot be split.

        ``whole`` are those that a run has shown to be so.
        """
        opaque = {name for module, name in self.names.items() if _is_opaque(module)} | set(whole)
        return {module: name for module, name in self.names.items() if opaque.isdisjoint(ancestors(name))}

    def infos(self, operations: dict[str, int], calls: dict[str, int]) -> dict[str, ModuleInfo]:
        """What the trace says about each module; a shared tensor counts for its first owner."""
        seen: set[int] = set()
        found = {}
        for module, name in self.names.items():
            own = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
            seen.update(map(id, own))
            buffers = [b for b in module._buffers.values() if b is not None and id(b) not in seen]
            seen.update(map(id, buffers))
            found[name] = ModuleInfo(
                name=name,
                kind=type(module).__name__,
                parameters=sum(p.numel() for p in own),
                parameter_bytes=sum(_size(p) for p in own),
                trainable_bytes=sum(_size(p) for p in own if p.requires_grad),
                buffer_bytes=sum(_size(b) for b in buffers),
                calls=calls.get(name, 0),
                operations=operations.get(name, 0),
                opaque=_is_opaque(module),
                container=_is_container(module) or _is_opened(module, name, calls),
            )
        return found


def _is_opaque(module: nn.Module) -> bool:
    """Modules that run as a whole: compiled and scripted ones."""
    return isinstance(module, torch.jit.ScriptModule | torch._dynamo.eval_frame.OptimizedModule)


def _is_container(module: nn.Module) -> bool:
    """Modules that nobody can call: lists and dicts of modules, and others without a forward."""
    if _is_opaque(module) or "forward" in module.__dict__:
        return False
    return type(module).forward is nn.Module.forward


def _is_opened(module: nn.Module, name: str, calls: dict[str, int]) -> bool:
    """Whether others call what is in a module, and not the module, as checkpoints of layers do."""
    if not calls or calls.get(name) or not name or _is_opaque(module):
        return False
    if any(True for _ in module.parameters(recurse=False)) or any(
        True for _ in module.buffers(recurse=False)
    ):
        return False
    return any(calls.get(f"{name}.{child}") for child, _ in module.named_modules() if child)


def _observe(
    module: nn.Module, call: Callable[[], Any], tree: _Tree, names: dict[nn.Module, str], *, memory: bool
) -> Observer:
    if not memory:
        observer = _observe_fake_unless_impossible(module, call, tree, names)
        if observer is not None:
            return observer
    return _observe_real(module, call, tree, names)


def _observe_fake_unless_impossible(
    module: nn.Module, call: Callable[[], Any], tree: _Tree, names: dict[nn.Module, str]
) -> Observer | None:
    """Run under fake tensors; None if the script or an operation needs data.

    Raises:
        Exception: the script's own, which it does not raise a second time: no fault of the fakes.
    """
    try:
        return _observe_fake(module, call, tree, names)
    except SMPError:
        raise
    except Exception as error:
        logger.debug("the dry run under fake tensors failed (%r); running the step once for real", error)
        if _comes_from_torch(error):  # fakes are torch's, so theirs are raised there
            return None
        try:
            _observe_fake(module, call, tree, names)
        except Exception:  # whatever it is, the real run decides whether it is the script's fault
            return None
        raise


def _comes_from_torch(error: Exception) -> bool:
    """Whether the line that raised is torch's, or C++ code called there."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return bool(frames) and frames[0].filename.startswith(_TORCH)


def _observe_fake(
    module: nn.Module, call: Callable[[], Any], tree: _Tree, names: dict[nn.Module, str]
) -> Observer:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    observer = Observer(Clock(torch.device("cpu")), tree.owners)
    written = WrittenParameters(module)
    try:
        with (
            _dry(module, written),
            _quiet(),
            scales_made_for_real(),
            fakes,
            written,  # an operation without a fake among its inputs is real
            observer,
            observer.saving(),
            observer.watching(names),
        ):
            observer.result(call())
    finally:
        forget_fake_results()
    return observer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a traceback for what fake tensors cannot do; the real run that follows decides."""
    of_torch = logging.getLogger(FakeTensorMode.__module__)
    before, of_torch.disabled = of_torch.disabled, True
    try:
        yield
    finally:
        of_torch.disabled = before


def _observe_real(
    module: nn.Module, call: Callable[[], Any], tree: _Tree, names: dict[nn.Module, str]
) -> Observer:
    observer = Observer(Clock(torch.device("cpu")), tree.owners)
    written = WrittenParameters(module)
    with _dry(module, written), written, observer, observer.saving(), observer.watching(names):
        observer.result(call())
    return observer


def _measure(
    module: nn.Module, call: Callable[[], Any], names: dict[nn.Module, str], device: torch.device
) -> dict[int, float]:
    """Forward seconds by unit: the quicker of two real runs (the first one warms up)."""
    written: WrittenParameters | None = WrittenParameters(module)
    clocks = [Clock(device), Clock(device)]
    for clock in clocks:
        with _dry(module, written), written or contextlib.nullcontext(), clock.follow(names):
            call()
        written = written if written is not None and written.found else None  # to look takes time
    return {unit: min(clock.seconds[unit] for clock in clocks) for unit in clocks[1].seconds}


def _measure_if_doubtful(
    module: nn.Module,
    call: Callable[[], Any],
    observer: Observer,
    names: dict[nn.Module, str],
    device: torch.device,
) -> dict[int, float] | None:
    """Measured seconds where the estimate has missed work; None where it has not, or they cannot be had.

    No gradients are asked for, so that nothing is kept for them: the whole model runs on this rank.
    """
    doubtful = observer.doubtful
    if not doubtful:
        return None
    try:
        with torch.no_grad():
            measured = _measure(module, call, names, device)
    except Exception as error:  # a script may need gradients, and what only estimates need must not stop it
        logger.debug("the step could not be timed (%r); its work is estimated from shapes alone", error)
        return None
    missed = [unit for unit in doubtful if outweighs(measured.get(unit, 0.0), observer.forward_seconds[unit])]
    return measured if missed else None


@contextlib.contextmanager
def _dry(module: nn.Module, written: WrittenParameters | None) -> Iterator[None]:
    """Mark the thread as tracing, and put back whatever the run may change in the model."""
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        # of several devices only the current one is used; asking for all would start CUDA on each
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with (
            untouched(module, written),
            own_parametrization_cache(),
            torch.random.fork_rng(devices),
            torch.compiler.set_stance("force_eager"),
            backward_left_out(is_tracing),  # without gradients, an optimizer's step changes nothing
        ):
            yield
    finally:
        _local.depth -= 1
        torch.clear_autocast_cache()  # of fakes, which a region around the step would hand to the real run


def _trace(tree: _Tree, observer: Observer, measured: dict[int, float] | None) -> ModelTrace:
    position = observer.position
    for key, parameter in tree.parameters.items():
        if parameter.requires_grad and observer.users.get(key):
            unit = observer.uses.get(tree.owners[key][0], min(observer.users[key]))
            observer.backward_seconds[unit] += accumulation_seconds(_size(parameter), parameter.device)
    units = []
    for index, entered in enumerate(position.entered):
        forward, backward = observer.forward_seconds[index], observer.backward_seconds[index]
        late = observer.late.seconds[index]
        if measured is not None:
            seconds = measured.get(index, 0.0)
            if outweighs(seconds, forward):  # what was estimated says nothing of the backward either
                backward = BACKWARD_OF_FORWARD * seconds if backward else 0.0
            else:
                scale = seconds / forward if forward else 0.0
                backward, late = backward * scale, late * scale
            forward = seconds
        units.append(
            Unit(
                module=entered,
                forward_seconds=forward,
                backward_seconds=backward,
                flops=observer.flops[index],
                activation_bytes=observer.activation_bytes[index],
                late_input_bytes=observer.late.input_bytes[index],
                late_gradient_bytes=observer.late.gradient_bytes[index],
                late_seconds=min(late, backward),
            )
        )
    return ModelTrace(
        modules=tree.infos(observer.operations, position.calls),
        units=tuple(units),
        edges=tuple(
            Edge(source=source, target=target, bytes=size, tensor=number)
            for (source, target, number), size in observer.edges.items()
        ),
        aliases=tree.aliases,
        uses=observer.uses,
        shared=tree.shared,
        reuses=tuple(
            Reuse(
                bytes=_size(parameter),
                units=tuple(sorted(observer.users[key])),
                name=tree.first_names[key],
                bound=key in observer.bound,
            )
            for key, parameter in tree.parameters.items()
            if len(observer.users.get(key, ())) > 1
        ),
        hooked=frozenset(observer.hooked),
        escapes=frozenset(observer.escapes.found),
        guests=frozenset(position.guests),
        measured=measured is not None,
    )


def _shared(parameters: Mapping[str, nn.Parameter]) -> tuple[tuple[str, ...], ...]:
    """The names of parameters that are one, or several in the same memory, as ``assign=True`` makes them."""
    one_of = overlapping(parameters.values())
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(one_of[id(parameter)], []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

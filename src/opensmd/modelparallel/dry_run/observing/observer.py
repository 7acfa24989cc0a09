"""Watching a model run: which unit each operation belongs to, and what it costs.

Module hooks show where the run is, a dispatch mode sees every operation below autograd, and a saved-tensor
hook sees what is kept for backward.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensmd.modelparallel._torch_internals import watchers
from opensmd.modelparallel.dry_run._torch_internals import seeing_what_is_saved
from opensmd.modelparallel.dry_run.observing.backward_reach import BackwardReach
from opensmd.modelparallel.dry_run.observing.data_flow import DataFlow
from opensmd.modelparallel.dry_run.observing.escaped_tensors import EscapeSearch
from opensmd.modelparallel.dry_run.observing.weight_gradient_memory import LateGradients
from opensmd.modelparallel.dry_run.timing.clock import Clock
from opensmd.modelparallel.dry_run.timing.step_clock import losses_in
from opensmd.modelparallel.dry_run.timing.step_record import StepRecord
from opensmd.modelparallel.dry_run.timing.unseen_work import UnseenWork
from opensmd.modelparallel.planning.costs.cost import cost_of
from opensmd.modelparallel.runtime.side_effects.random_numbers.positions import generator_positions
from opensmd.modelparallel.runtime.tensors.storages import StorageSet

__all__ = ["Observer"]


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Sums up costs by unit and module while active.

    Args:
        position: where the run is, and for how long.
        owners: the modules that own a parameter or buffer, by its id.

    Attributes:
        flow: what units produce and use.
        hooked: the modules with forward hooks.
        late: what backwards may leave for later.
        record: what can run again.
        escapes: tensors that hooks carry out of modules.
        unseen: work that operations do not show.
        reach: which operations have a backward.
        went_backward: whether there was a backward within the run.
        forward_seconds, flops, activation_bytes: by unit.
        operations: their number, by innermost module.
    """

    def __init__(self, position: Clock[float], owners: dict[int, list[str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.position = position
        self.unseen = UnseenWork(lambda: position.current, position.watch.now)
        self.flow = flow = DataFlow(position.stack, owners)
        self.forward_seconds: dict[int, float] = defaultdict(float)
        self.flops: dict[int, float] = defaultdict(float)
        self.activation_bytes: dict[int, int] = defaultdict(int)
        self.hooked: set[str] = set()
        self.late = LateGradients(flow.is_parameter)
        self.reach = BackwardReach()
        self.record = StepRecord()
        self.went_backward = False
        self.escapes = EscapeSearch(position.stack, flow.made_by)
        self.operations: dict[str, int] = defaultdict(int)
        self._backwards: dict[tuple[int, int], float] = defaultdict(float)  # by unit, and number for reach
        self._kept = StorageSet()
        self._packing = False  # whether the operation is this observer's own
        self._script_generators = generator_positions()  # when the outermost module was called

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._packing:
            return func(*args, **kwargs)
        since = self.position.watch.now()
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        out = func(*args, **kwargs)
        unit = self.position.current
        if not isinstance(func, torch._ops.OpOverload):
            return out
        if unit >= 0:
            unit = self.flow.operation(inputs, out, unit, is_view=func.is_view)
            self.escapes.operation(inputs, out)
        differentiated = needs_gradient or self.unseen.differentiates
        self.record.note(func, args, kwargs, out, unit, differentiated=differentiated)
        if unit < 0:
            return out  # before the model's first call, so data that every rank has
        cost = cost_of(func, args, kwargs, out, needs_gradient=differentiated)
        self.flops[unit] += cost.flops
        self.forward_seconds[unit] += cost.forward_seconds
        number = self.reach.operation() if differentiated else None
        if number is not None:
            self._backwards[unit, number] += cost.backward_seconds
        self.late.operation(func, args, inputs, out, unit, cost.forward_seconds)
        self.record.weigh(func, cost)
        if self.position.stack:
            self.operations[self.position.stack[-1]] += 1
        self.unseen.operation(func, unit, since)
        return out

    def _entered(self, module: nn.Module, args: Any) -> None:
        if len(self.position.stack) == 1:
            self._script_generators = generator_positions()
        if self.unseen.in_function:  # its backward may call the module again, on one rank
            self.position.whole.update(self.position.stack[-2:-1])
        self.flow.entered(args)
        self.escapes.entered(module, args)

    def _returned(self, module: nn.Module, args: Any, out: Any) -> None:
        self.escapes.returned(module, args, out)
        if len(self.position.stack) == 1 and generator_positions() != self._script_generators:
            self.record.draws = True

    @contextlib.contextmanager
    def watching(self, names: dict[nn.Module, str]) -> Iterator[None]:
        """Watch the calls of modules."""
        self.flow.watch(names)
        with (
            self.position.follow(names, self._entered, self._returned),
            self.unseen.watching_functions(),
        ):
            yield
            self.hooked = {name for module, name in names.items() if _has_further_hooks(module)}

    @property
    def doubtful(self) -> set[int]:
        """Return the units whose estimated seconds may have missed work."""
        return self.unseen.units(self.position.seconds, self.forward_seconds)

    def result(self, value: Any) -> None:
        """Note that the run returned ``value``, from which the caller may run backward."""
        self.escapes.result(value)
        if not self.went_backward:
            self._goes_backward(losses_in(value))

    def backward(self, plain: Callable[..., None], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note a backward in place of running ``plain(*args, **kwargs)``."""
        self.went_backward = True
        self._goes_backward(tree_leaves(args[0] if args else kwargs["tensors"]))

    def _goes_backward(self, losses: Sequence[Tensor]) -> None:
        self.reach.losses(losses)
        self.record.goes_backward(losses)

    def backward_seconds(self) -> dict[int, float]:
        """Return what backwards take, by unit."""
        seconds: dict[int, float] = defaultdict(float)
        for (unit, number), each in self._backwards.items():
            seconds[unit] += each if self.reach.has(number) else 0.0
        return seconds

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that counts tensors saved for backward: each storage once, without parameters."""
        return seeing_what_is_saved(self._pack)

    def _pack(self, tensor: Tensor) -> Tensor:
        unit, since = self.position.current, self.position.watch.now()
        if unit >= 0 and not self.flow.is_parameter(tensor):
            self.late.save(tensor)
            if self._kept.add(tensor):
                self.activation_bytes[unit] += tensor.untyped_storage().nbytes()
        # Saved unchanged, an operation's result would keep its own graph, and the model, alive forever.
        self._packing = True
        try:
            return tensor.detach()
        finally:
            self._packing = False
            self.unseen.looked_on(unit, since)


def _has_further_hooks(module: nn.Module) -> bool:
    """Whether there are forward hooks besides the two of :meth:`Position.follow`."""
    return watchers(module) > 2

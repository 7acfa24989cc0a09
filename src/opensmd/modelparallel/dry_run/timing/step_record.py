"""The operations of a dry run in order, and which tensors they pass on, so that they can run again.

The times of convolutions vary more than rules based on shapes can say, and so do those of many small
operations, while large ones keep to their rates. So where there is a substantial part of the former, all
operations of the run are run again on real memory, and timed (:mod:`.replay`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from opensmd.modelparallel.planning.costs.cost import OperationCost
from opensmd.modelparallel.planning.costs.cpu.sizes import size_of
from opensmd.modelparallel.runtime.side_effects.written import written_by_operation
from opensmd.modelparallel.runtime.tensors.storages import StorageSet, has_storage

__all__ = ["TensorNumber", "StepOperation", "StepRecord"]

# If convolutions are less of the estimated work, estimates are as good as measurements for steps longer than
# SHORT. With fewer seconds than LEAST, messages outweigh what a better cut would gain.
SHORT = 20e-3
LEAST = 5e-3
CONVOLUTIONS = 0.1


class TensorNumber(NamedTuple):
    """Stands for a tensor among the arguments of an operation."""

    number: int


@dataclass(frozen=True)
class StepOperation:
    """An operation of the run.

    Attributes:
        func, leaves, structure: what was called, with which arguments.
        results: the numbers of the tensors in its result, in order.
        unit: where it was called; negative before the model's first call.
        with_gradients: whether gradients were enabled.
    """

    func: torch._ops.OpOverload
    leaves: tuple[Any, ...]
    structure: TreeSpec
    results: tuple[int, ...]
    unit: int
    with_gradients: bool

    @property
    def given(self) -> set[int]:
        """The numbers of the tensors among its arguments."""
        return {leaf.number for leaf in self.leaves if isinstance(leaf, TensorNumber)}


class StepRecord:
    """The operations of one run.

    Attributes:
        draws: whether the model drew random numbers, from torch's generators or the script's, so that results
            depend on where modules are.
        is_complete: whether all of it can run again and leave the model and the script as they are.
        given: tensors that no operation made, by number: parameters, buffers, inputs and constants.
        losses: the numbers of the tensors from which backward runs.
        returned_bytes: of the results of operations with a backward.
    """

    def __init__(self) -> None:
        self.draws = False
        self.is_complete = True
        self.given: dict[int, Tensor] = {}
        self.losses: list[int] = []
        self.returned_bytes = 0
        self._recorded: list[StepOperation] = []
        self._numbers: Any = WeakTensorKeyDictionary()  # of tensors that are alive
        self._count = 0
        self._views_of_parameters = StorageSet()
        self._work = self._convolutions = 0.0

    def note(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        unit: int,
        *,
        differentiated: bool,
    ) -> None:
        """Note an operation that has just run in ``unit``."""
        self.draws = self.draws or (unit >= 0 and _draws(func, args, kwargs))
        if func.namespace == "prim" or not self.is_complete:  # the former only ask for properties
            return
        leaves, structure = tree_flatten((args, kwargs))
        new = [leaf for leaf in leaves if not (isinstance(leaf, Tensor) and leaf in self._numbers)]
        of_torch = func.namespace == "aten"  # others are the script's code, or communicate
        if not of_torch or self._writes_parameter(func, args, kwargs) or not all(map(_can_be_had, new)):
            self._give_up()
            return
        passed = tuple(self._passed(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if func.is_view and any(isinstance(leaf, Tensor) and self._is_parameter(leaf) for leaf in leaves):
            for view in made:
                self._views_of_parameters.add(view)
        if differentiated and not func.is_view:
            self.returned_bytes += sum(size_of(each) for each in made if each not in self._numbers)
        with_gradients = differentiated or torch.is_grad_enabled()
        results = tuple(map(self._number, made))
        self._recorded.append(StepOperation(func, passed, structure, results, unit, with_gradients))

    def weigh(self, func: torch._ops.OpOverload, estimate: OperationCost) -> None:
        """Add an operation of the model to the estimated work."""
        seconds = estimate.forward_seconds + estimate.backward_seconds
        self._work += seconds
        self._convolutions += seconds if func.overloadpacket is torch.ops.aten.convolution else 0.0

    def goes_backward(self, losses: Sequence[Tensor]) -> None:
        """Note that backward runs from ``losses``."""
        if all(loss in self._numbers for loss in losses):
            self.losses += [self._numbers[loss] for loss in losses]
        else:
            self._give_up()

    @property
    def is_worth_timing(self) -> bool:
        """Whether measurements may give a better cut than estimates."""
        return LEAST < self._work < SHORT or self._convolutions > CONVOLUTIONS * self._work

    def operations(self) -> Iterator[tuple[StepOperation, Collection[int]]]:
        """Yield each operation with the numbers of tensors that none after it needs.

        Left out is what only torch's own bookkeeping has called: a view or an empty tensor that nothing uses,
        and a copy for the backward of the operation after it, which makes another when it runs again.
        """
        used = set(self.losses)
        found: list[tuple[StepOperation, set[int]]] = []
        for each, following in zip(reversed(self._recorded), [None, *reversed(self._recorded)], strict=False):
            given = each.given
            if used.isdisjoint(each.results) and (
                each.func.is_view or not given or _is_copy_for_backward(each, following)
            ):
                continue
            found.append((each, given.union(each.results) - used))
            used.update(given, each.results)
        return reversed(found)

    def _writes_parameter(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        return any(map(self._is_parameter, written_by_operation(func, args, kwargs)))

    def _is_parameter(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or tensor in self._views_of_parameters

    def _give_up(self) -> None:
        """Let go of everything."""
        self.is_complete = False
        self.given.clear()
        self._recorded.clear()

    def _passed(self, tensor: Tensor) -> TensorNumber:
        number = self._numbers.get(tensor)
        if number is None:
            number = self._number(tensor)
            self.given[number] = tensor
        return TensorNumber(number)

    def _number(self, tensor: Tensor) -> int:
        number: int | None = self._numbers.get(tensor)
        if number is None:
            number = self._numbers[tensor] = self._count
            self._count += 1
        return number


def _is_copy_for_backward(operation: StepOperation, following: StepOperation | None) -> bool:
    """Whether this copies what the operation after it overwrites."""
    if following is None or operation.func is not torch.ops.aten.clone.default:
        return False
    return following.func._schema.is_mutable and following.leaves[0] == operation.leaves[0]


def _can_be_had(leaf: Any) -> bool:
    """Whether an argument can be given again; of tensors, these are plain ones with data."""
    if not isinstance(leaf, Tensor):
        return not isinstance(leaf, torch.Generator | torch.UntypedStorage)
    if isinstance(leaf, FakeTensor) or leaf.device.type != "cpu" or not leaf.is_leaf:
        return False
    return type(leaf) in (Tensor, nn.Parameter) and has_storage(leaf)


def _draws(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers; fused attention does only with a nonzero dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True

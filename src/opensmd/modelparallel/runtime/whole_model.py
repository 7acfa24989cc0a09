"""Steps of a model that this rank has as a whole: microbatches run one by one, and nothing is intercepted.

It is to such a model what the engine is to a split one. Backwards are seen for the replicas alone, which
reduce gradients in the last of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from opensmd.modelparallel._torch_internals import reaches, run_backward
from opensmd.modelparallel.redirection._torch_internals import replaced_backward
from opensmd.modelparallel.replicas.backward_count import Backwards
from opensmd.modelparallel.runtime.backward.backward_pass import Reducer
from opensmd.modelparallel.runtime.backward.roots import root_gradient, root_pairs
from opensmd.modelparallel.runtime.backward.sum_warning import SumWarning
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.structure import Arguments

__all__ = ["WholeModel"]


class WholeModel:
    """Runs microbatches of a whole model.

    Args:
        module: the model.
        sum_warning: sees every backward of torch's own.
        is_sharded: its parameters are shared out among replicas, and in no graph for long.

    Attributes:
        reducer: of the replicas, once there are any.
    """

    def __init__(self, module: nn.Module, sum_warning: SumWarning, *, is_sharded: bool) -> None:
        self.reducer: Reducer | None = None
        self._module = module
        self._sum_warning = sum_warning
        self._is_sharded = is_sharded
        self._backwards = Backwards(0)
        self._microbatch = 0
        self._in_backward = False

    def run(
        self, function: Callable[..., Any], calls: Sequence[Arguments], *, detach: bool, backwards: Backwards
    ) -> list[Any]:
        """Run ``function`` once for each of ``calls``, as :meth:`.Engine.run`."""
        self._backwards = backwards
        results = []
        with replaced_backward(self._plain_backward):
            for microbatch, (args, kwargs) in enumerate(calls):
                self._microbatch = microbatch
                result = function(*args, **kwargs)
                results.append(_detached(result) if detach else result)
        return results

    def backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None,
        retain_graph: bool | None,
        *,
        share: float,
    ) -> None:
        """``model.backward`` of the microbatch that runs; ``share`` is what gradients are multiplied by."""
        roots, given = root_pairs(tensors, grad_tensors)
        gradients = [
            root_gradient(root, gradient, share) for root, gradient in zip(roots, given, strict=True)
        ]
        with self._reduced_if_last(roots):
            run_backward(roots, gradients, retain_graph=bool(retain_graph))

    def _plain_backward(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """``loss.backward()`` in a step: replicas reduce what it brings to the model, too."""
        tensors: Any = args[0] if args else kwargs["tensors"]
        roots = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        inside = self._in_backward  # a reentrant checkpoint calls it, or a hook
        if inside or kwargs.get("inputs") is not None or not self._may_reach(roots):
            original(*args, **kwargs)
            return
        self._sum_warning.plain_backward(self._backwards.microbatches)
        with self._reduced_if_last(roots):
            original(*args, **kwargs)

    def _may_reach(self, roots: Sequence[Tensor]) -> bool:
        """Whether this may be a backward of the model."""
        return self._is_sharded or reaches(roots, self._module.parameters())

    @contextlib.contextmanager
    def _reduced_if_last(self, roots: Sequence[Tensor]) -> Iterator[None]:
        """Around a backward, in which replicas reduce gradients if it may be the step's last."""
        reducer, microbatch = self.reducer, self._microbatch
        self._backwards.add(microbatch)
        if reducer is not None and self._backwards.may_be_last(microbatch):
            reducer.before_last_backward(roots)
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
        if reducer is not None:
            reducer.after_backward()


def _detached(result: Any) -> Any:
    """Return a microbatch's result without its graphs."""
    return structure.substitute(result, iter([each.detach() for each in structure.tensors_in(result)]))

"""Steps of a model that is whole on this rank: microbatches run one by one, and nothing is intercepted.

This is the counterpart of the engine for split models. It watches backwards only for the replicas, which
reduce gradients in a step's last one.
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
        is_sharded: whether its parameters are split over replicas, and so not in any graph for long.

    Attributes:
        reducer: that of the replicas, once there are any.
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
        """Run ``function`` once for each of ``calls``, like :meth:`.Engine.run`."""
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
        """Run ``model.backward`` of the current microbatch; ``share`` is the factor for gradients."""
        roots, starts = root_pairs(tensors, grad_tensors)
        gradients = [root_gradient(root, start, share) for root, start in zip(roots, starts, strict=True)]
        with self._reduced_if_last(roots):
            run_backward(roots, gradients, retain_graph=bool(retain_graph))

    def _plain_backward(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Run ``loss.backward()`` in a step; replicas also reduce its gradients."""
        tensors: Any = args[0] if args else kwargs["tensors"]
        roots = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        inside = self._in_backward  # called by a reentrant checkpoint or a hook
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
        """Wrap a backward, in which replicas reduce gradients if it may be the step's last."""
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
    return structure.substitute(result, iter([tensor.detach() for tensor in structure.tensors_in(result)]))

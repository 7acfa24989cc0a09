"""What the dry run does to torch without a public interface, undone when it ends.

tests/unit/modelparallel/test_torch_internals.py fails when torch changes any of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = [
    "has_backward_hooks",
    "made_by",
    "number_of_next_node",
    "own_parametrization_cache",
    "seeing_what_is_saved",
]

Pack = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def seeing_what_is_saved(pack: Pack) -> Iterator[None]:
    """Show ``pack`` every tensor that is saved for backward, except inside transforms.

    Transforms allow no hooks on saved tensors and check for that when they start, so this hook is removed
    there.
    """
    graph: Any = torch.autograd.graph
    plain = graph.disable_saved_tensors_hooks
    autograd = torch._C._autograd

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    @contextlib.contextmanager
    def stepping_aside(*args: Any, **kwargs: Any) -> Iterator[None]:
        top = autograd._top_saved_tensors_default_hooks(True)
        mine = top is not None and top[0] == pack
        if mine:
            autograd._pop_saved_tensors_default_hooks()
        try:
            with plain(*args, **kwargs):
                yield
        finally:
            if mine:
                autograd._push_saved_tensors_default_hooks(pack, unpack)

    graph.disable_saved_tensors_hooks = stepping_aside
    try:
        with graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        graph.disable_saved_tensors_hooks = plain


@contextlib.contextmanager
def own_parametrization_cache() -> Iterator[None]:
    """Forget afterwards what ``parametrize.cached()`` has cached inside, which may be without data."""
    kept, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = kept


def number_of_next_node() -> int:
    """Return the sequence number of the next graph node that this thread creates."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def made_by(node: torch.autograd.graph.Node) -> int | None:
    """Return the sequence number of a node; None for a gradient accumulator, which is created only once."""
    if node.name() == "torch::autograd::AccumulateGrad":
        return None
    number: int = node._sequence_nr()
    return number


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a backward would call hooks of parameters or modules."""
    return any(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        for parameter in module.parameters()
    ) or any(each._backward_hooks or each._backward_pre_hooks for each in module.modules())

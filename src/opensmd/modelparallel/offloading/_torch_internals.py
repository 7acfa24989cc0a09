"""The private parts of ``torch.utils.checkpoint`` in which both of its forms save inputs.

Scripts and transformers import the function by name, so it cannot be replaced as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor

__all__ = ["saving_inputs"]

Around = Callable[[Sequence[Tensor]], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def saving_inputs(around: Around) -> Iterator[None]:
    """Make checkpoints save their inputs inside ``around(inputs)``, while the context is open."""
    frame, function = torch_checkpoint._CheckpointFrame, torch_checkpoint.CheckpointFunction
    plain_save: Callable[..., None] = frame.save_inputs

    def save_inputs(self: Any, *args: Any) -> None:
        with around(_tensors(args)):
            plain_save(self, *args)

    def apply(cls: type, *args: Any) -> Any:
        # The function inside runs without a graph, so nothing else is saved there.
        with around(_tensors(args)):
            return super(function, cls).apply(*args)  # type: ignore[misc]

    frame.save_inputs = save_inputs  # type: ignore[method-assign]
    function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        frame.save_inputs = plain_save  # type: ignore[method-assign]
        del function.apply


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    return [value for value in args if isinstance(value, Tensor)]

"""``smp.nn.DistributedTransformer``: a stack of layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from opensmd.modelparallel.tensor_parallel.transformer.blocks import Block, norm
from opensmd.modelparallel.tensor_parallel.transformer.layer import DistributedTransformerLayer

__all__ = ["DistributedTransformer"]


class DistributedTransformer(Block):
    """A stack of :class:`DistributedTransformerLayer` in ``seq_layers``, an ``nn.Sequential``.

    With both ``pre_layernorm`` and ``post_layernorm``, there is one more normalisation at each end of the
    stack.

    Args:
        num_layers: the number of layers.
        window_sizes: one per layer, if they differ.
        settings: those of :class:`DistributedTransformerLayer`, by name.

    Raises:
        TypeError, ValueError: as there.
    """

    def __init__(
        self, num_layers: int = 12, *, window_sizes: list[int | None] | None = None, **settings: Any
    ) -> None:
        super().__init__()
        windows = [settings.pop("window_size", None)] * num_layers if window_sizes is None else window_sizes
        layers = [
            DistributedTransformerLayer(**{**settings, "layer_idx": index, "window_size": window})
            for index, window in enumerate(windows)
        ]
        self.options = layers[0].options
        self.seq_layers = nn.Sequential(*layers)
        both = bool(settings.get("pre_layernorm", False) and settings.get("post_layernorm", True))
        self.first_layernorm = norm(self.options, wanted=both)
        self.last_layernorm = norm(self.options, wanted=both)

    def forward(self, inputs: Any) -> tuple[Any, ...]:
        """Run all layers; takes and returns what :meth:`DistributedTransformerLayer.forward` does."""
        given = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs, None)
        hidden, *rest = self.enter(given)
        if self.first_layernorm is not None:
            hidden = self.first_layernorm(hidden)
        hidden = self.seq_layers((hidden, *rest))[0]
        if self.last_layernorm is not None:
            hidden = self.last_layernorm(hidden)
        return (self.leave(hidden), *given[1:])

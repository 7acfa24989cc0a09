"""``smp.nn.DistributedTransformerLayer``: attention, cross attention and output of one layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from opensmd.modelparallel.tensor_parallel.transformer.attention import DistributedAttentionLayer
from opensmd.modelparallel.tensor_parallel.transformer.blocks import Block, add, norm
from opensmd.modelparallel.tensor_parallel.transformer.options import LayerOptions, layer_options
from opensmd.modelparallel.tensor_parallel.transformer.output import DistributedTransformerOutputLayer

__all__ = ["DistributedTransformerLayer"]


class DistributedTransformerLayer(Block):
    """One layer of a transformer; its parts are ``attention``, ``cross_attention`` and ``output``.

    Args:
        num_attention_heads, attention_head_size, hidden_size, intermediate_size: sizes; the number of ranks
            must divide the first and the last.
        attention_dropout_prob, hidden_dropout_prob: dropout of probabilities and of outputs.
        activation: such as ``"gelu"``.
        layernorm_epsilon: of the normalisations.
        initializer_range, use_normal_initialization: the initial values.
        causal_mask_size: if None, every word sees all; otherwise none sees later ones.
        add_cross_attention: a second attention, to other states.
        pre_layernorm, post_layernorm: where attention and output normalise; at least one of them.
        more: settings of :class:`LayerOptions`.

    Raises:
        TypeError: an unknown keyword.
        ValueError: sizes that the number of ranks does not divide, or no normalisation.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **more: Any,
    ) -> None:
        super().__init__()
        self.options = options = layer_options(
            "DistributedTransformerLayer",
            num_attention_heads=num_attention_heads,
            attention_head_size=attention_head_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            attention_dropout_prob=attention_dropout_prob,
            hidden_dropout_prob=hidden_dropout_prob,
            activation=activation,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            causal_mask_size=causal_mask_size,
            add_cross_attention=add_cross_attention,
            pre_layernorm=pre_layernorm,
            post_layernorm=post_layernorm,
            **more,
        )
        given = _of_attention(options)
        self.layernorm = norm(options, wanted=options.parallel_residual)
        self.attention = DistributedAttentionLayer(**given)
        self.cross_attention = None
        if add_cross_attention:
            self.cross_attention = DistributedAttentionLayer(**given | {"cross_attention": True})
        self.output = DistributedTransformerOutputLayer(**_of_output(options))

    def forward(self, inputs: Any) -> tuple[Any, ...]:
        """Run the layer.

        Args:
            inputs: ``(hidden, mask)``, or with cross attention ``(hidden, cross states, mask, cross mask)``;
                masks as in :class:`DistributedAttentionLayer`, or None.

        Returns:
            The same tuple with new hidden states.
        """
        hidden, *rest = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs, None)
        given = [hidden, *rest]
        hidden, *inner = self.enter(given)
        states, mask, cross_mask = None, inner[0] if inner else None, None
        if self.cross_attention is not None:
            states, mask, cross_mask = (*inner, None, None, None)[:3]
        if self.layernorm is not None:
            normed = self.layernorm(hidden)
            output = self.attention((normed, mask)) + self.output(normed)
            hidden = add(hidden, output, self.options)
        else:
            hidden = self.attention((hidden, mask))
            if self.cross_attention is not None:
                hidden = self.cross_attention((hidden, states, cross_mask))
            hidden = self.output(hidden)
        return (self.leave(hidden), *rest)


def _of_attention(options: LayerOptions) -> dict[str, Any]:
    given = asdict(options)
    del given["add_cross_attention"], given["intermediate_size"], given["activation"]
    return given


def _of_output(options: LayerOptions) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if name != "add_cross_attention"}

"""``smp.nn.DistributedTransformerOutputLayer``: the two linear layers after an attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from opensmd.modelparallel.tensor_parallel.layers.linear import ColumnLinear, RowLinear, require_divisible
from opensmd.modelparallel.tensor_parallel.random import CommonDropout
from opensmd.modelparallel.tensor_parallel.transformer.blocks import Block, add, norm
from opensmd.modelparallel.tensor_parallel.transformer.options import activation_of, layer_options

__all__ = ["DistributedTransformerOutputLayer"]


class DistributedTransformerOutputLayer(Block):
    """Two linear layers with an activation in between, dropout, residual and normalisation.

    Args:
        hidden_size: of inputs and outputs.
        intermediate_size: between the linear layers; the number of ranks must divide it.
        hidden_dropout_prob: of the output.
        activation: such as ``"gelu"``, ``"gelu_new"`` or ``"relu"``.
        layernorm_epsilon: of the normalisations.
        initializer_range, use_normal_initialization: whether and how weights are drawn from a normal
            distribution; otherwise as in torch.
        pre_layernorm, post_layernorm: normalise the input; normalise the sum with the residual.
        fp32_residual_addition: add the residual in float32.
        more: settings of :class:`LayerOptions`.

    Raises:
        TypeError: an unknown keyword.
        ValueError: the number of ranks does not divide ``intermediate_size``, or an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        **more: Any,
    ) -> None:
        super().__init__()
        name = "DistributedTransformerOutputLayer"
        self.options = options = layer_options(
            name,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            hidden_dropout_prob=hidden_dropout_prob,
            activation=activation,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            pre_layernorm=pre_layernorm,
            post_layernorm=post_layernorm,
            fp32_residual_addition=fp32_residual_addition,
            **more,
        )
        require_divisible(f"smp.nn.{name}", intermediate_size=intermediate_size)
        alone = options.parallel_residual  # the layer normalises and adds
        self.activation = activation_of(activation)
        self.pre_layernorm = norm(options, wanted=pre_layernorm and not alone)
        self.dense1 = ColumnLinear(hidden_size, intermediate_size, std=options.std)
        self.dense2 = RowLinear(intermediate_size, hidden_size, std=options.std)
        self.dropout = CommonDropout(hidden_dropout_prob)
        self.post_layernorm = norm(options, wanted=post_layernorm and not alone)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[batch, words, hidden_size]`` to the same shape."""
        (hidden,) = self.enter([hidden])
        return self.leave(self.transform(hidden))

    def transform(self, hidden: Tensor) -> Tensor:
        """:meth:`forward` within the shared region."""
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        output: Tensor = self.dropout(self.dense2(self.activation(self.dense1(normed))))
        if self.options.parallel_residual:
            return output
        output = add(hidden, output, self.options)
        post: nn.LayerNorm | None = self.post_layernorm
        return output if post is None else post(output)

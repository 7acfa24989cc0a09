"""The distributed counterparts of torch's own modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from opensmd.modelparallel.tensor_parallel.layers.embedding import DistributedEmbedding
from opensmd.modelparallel.tensor_parallel.layers.linear import DistributedLinear
from opensmd.modelparallel.tensor_parallel.whole_values import made_of

__all__ = ["distributed"]


def distributed(module: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Return a :class:`DistributedLinear` or :class:`DistributedEmbedding` with the module's values.

    Args:
        config: the context's, of which these modules use only ``vocab_parallel``.

    Raises:
        ValueError: the number of ranks does not divide its sizes.
    """
    values = dict(module.named_parameters())
    if isinstance(module, nn.Linear):
        linear = module

        def make_linear() -> nn.Module:
            return DistributedLinear(linear.in_features, linear.out_features, linear.bias is not None)

        return made_of(make_linear, values, module)
    assert isinstance(module, nn.Embedding)
    embedding = module

    def make_embedding() -> nn.Module:
        return DistributedEmbedding(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            embedding.max_norm,
            embedding.norm_type,
            embedding.scale_grad_by_freq,
            embedding.sparse,
            vocab_parallel=bool(config.get("vocab_parallel", False)),
        )

    return made_of(make_embedding, values, module)

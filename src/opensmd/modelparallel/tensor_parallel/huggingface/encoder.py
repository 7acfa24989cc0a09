"""BERT's and RoBERTa's encoders as distributed transformers with the originals' interface.

Embeddings, poolers and heads around them remain Hugging Face's own, so every model of these families works.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel.tensor_parallel.huggingface.checkpointed_layers import keep_checkpointing
from opensmd.modelparallel.tensor_parallel.huggingface.translation import Family, from_huggingface
from opensmd.modelparallel.tensor_parallel.transformer.stack import DistributedTransformer
from opensmd.modelparallel.tensor_parallel.whole_values import made_of

__all__ = ["FAMILY", "DistributedEncoder", "encoder"]

FAMILY = Family(
    layers="layer",
    modules={
        "attention.output.dense": "attention.dense",
        "attention.output.LayerNorm": "attention.post_layernorm",
        "intermediate.dense": "output.dense1",
        "output.dense": "output.dense2",
        "output.LayerNorm": "output.post_layernorm",
    },
    separate=("attention.self.query", "attention.self.key", "attention.self.value"),
)


class DistributedEncoder(DistributedTransformer):
    """A distributed stack with the arguments and results of a Hugging Face encoder.

    Args:
        config: Hugging Face's.
        settings: those of :class:`DistributedTransformer`.
    """

    def __init__(self, config: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.config = config

    def forward(  # type: ignore[override]  # the original's call
        self,
        hidden_states: Any,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run like the original, without caches and cross attention.

        Raises:
            ValueError: caches or cross attention are requested.
        """
        from transformers import modeling_outputs

        given = {
            "encoder_hidden_states": encoder_hidden_states,
            "past_key_values": past_key_values,
            "cache": kwargs.get("cache"),
            "output_attentions": kwargs.get("output_attentions") or None,
            "output_hidden_states": kwargs.get("output_hidden_states") or None,
        }
        refused = [name for name, value in given.items() if value is not None]
        if refused:
            raise ValueError(
                f"an encoder that smp.tensor_parallelism distributed does not take {', '.join(refused)}"
            )
        hidden, _ = super().forward((hidden_states, self._mask(attention_mask, hidden_states)))
        return modeling_outputs.BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    def _mask(self, given: Tensor | None, hidden: Tensor) -> Tensor | None:
        """Return a mask of four axes; the original gives flash attention one of two, in which 1 is seen."""
        if given is None and self.scales_batch:
            # The original makes none if nothing is padded, but other ranks may have one, and all are
            # gathered.
            batch, words = hidden.shape[:2]
            return torch.ones(batch, 1, words, words, dtype=torch.bool, device=hidden.device)
        if given is not None and given.dim() == 2:
            return given.bool()[:, None, None, :]
        return given


def encoder(module: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Return the distributed counterpart of a ``BertEncoder`` or ``RobertaEncoder``, with its values.

    Raises:
        ValueError: it is a decoder's, or has sizes that the number of ranks does not divide.
    """
    theirs: Any = module.config
    if theirs.is_decoder or theirs.add_cross_attention:
        raise ValueError("an encoder that is used as a decoder has no distributed counterpart")
    if getattr(theirs, "chunk_size_feed_forward", 0):
        raise ValueError("chunk_size_feed_forward has no distributed counterpart")
    settings: dict[str, Any] = {
        "num_layers": theirs.num_hidden_layers,
        "num_attention_heads": theirs.num_attention_heads,
        "attention_head_size": theirs.hidden_size // theirs.num_attention_heads,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "attention_dropout_prob": theirs.attention_probs_dropout_prob,
        "hidden_dropout_prob": theirs.hidden_dropout_prob,
        "activation": theirs.hidden_act,
        "layernorm_epsilon": theirs.layer_norm_eps,
        "initializer_range": theirs.initializer_range,
        # leaves out what is only for embeddings and language models
        **{name: value for name, value in config.items() if name not in ("vocab_parallel", "gather_logits")},
    }
    values = from_huggingface(FAMILY, dict(module.named_parameters()))
    distributed = made_of(lambda: DistributedEncoder(theirs, **settings), values, module)
    keep_checkpointing(module, distributed.seq_layers)
    return distributed

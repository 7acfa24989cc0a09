"""Hugging Face's causal language models as distributed transformers with the originals' interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.tensor_parallel.huggingface.checkpointed_layers import keep_checkpointing
from opensmd.modelparallel.tensor_parallel.huggingface.translation import Family, from_huggingface
from opensmd.modelparallel.tensor_parallel.transformer.lm_head import DistributedTransformerLMHead
from opensmd.modelparallel.tensor_parallel.whole_values import made_of

__all__ = ["DistributedCausalLM", "language_model", "settings_of", "settings_of_gpt"]

# The supported arguments of a call; all others must be unset.
_TAKEN = frozenset(
    {"input_ids", "attention_mask", "position_ids", "labels", "use_cache", "return_dict", "cache_position"}
)


class DistributedCausalLM(DistributedTransformerLMHead):
    """A distributed language model with the arguments and results of a Hugging Face one.

    Args:
        config: Hugging Face's.
        order: the names of the original's arguments.
        settings: those of :class:`DistributedTransformerLMHead`.
    """

    def __init__(self, config: Any, order: tuple[str, ...], **settings: Any) -> None:
        super().__init__(**settings)
        self.config = config
        self._order = order
        self.has_positions = self.position_embedding is not None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run like the original, for ``input_ids``, ``attention_mask``, ``position_ids`` and ``labels``.

        ``logits`` are None in training with labels, unless the model was created with ``gather_logits=True``;
        the loss is the mean over this rank's words.

        Raises:
            ValueError: an argument or output is requested that the distributed model does not have.
        """
        given = {**dict(zip(self._order, args, strict=False)), **kwargs}
        refused = [name for name, value in given.items() if name not in _TAKEN and _is_asked_for(value)]
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        if positions is not None and not self.has_positions:
            refused.append("position_ids")
        if mask is not None and mask.dim() != 2:
            refused.append(f"an attention_mask of {mask.dim()} axes")
        if refused:
            raise ValueError(
                f"{self._name} was distributed by smp.tensor_parallelism and does not take "
                f"{', '.join(refused)}"
            )
        masked = None if mask is None else 1 - mask.long()
        if masked is None and positions is not None and not self._makes_cache(given.get("use_cache")):
            masked = _within_sequences(positions)
        labels = given.get("labels")
        inputs = (given["input_ids"], masked, None, positions, labels)
        output = super().forward(*inputs)
        if given.get("return_dict") is False:
            return output if isinstance(output, tuple) else (output,)
        return self._as_original(output, labels is not None)

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse generation.

        Raises:
            SMPUnsupportedError: always.
        """
        raise SMPUnsupportedError(
            f"{self._name} was distributed by smp.tensor_parallelism, has no caches, and does not generate. "
            "Load its weights into the original: smp.save_checkpoint(partial=False) writes those"
        )

    @property
    def _name(self) -> str:
        return type(self.config).__name__.removesuffix("Config")

    def _makes_cache(self, use_cache: bool | None) -> bool:
        """Whether the original would create a cache; it then takes positions for those of one sequence."""
        return bool(self.config.use_cache if use_cache is None else use_cache)

    def _as_original(self, output: Any, has_loss: bool) -> Any:
        from transformers import modeling_outputs

        if self.lm_head is None:
            return modeling_outputs.BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=output)
        loss, logits = output if has_loss else (None, output)
        return modeling_outputs.CausalLMOutputWithCrossAttentions(loss=loss, logits=logits)


def _within_sequences(positions: Tensor) -> Tensor:
    """Return a mask (True is seen) for several texts in a row, which start where positions jump."""
    text = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return (text.unsqueeze(-1) == text.unsqueeze(-2)).unsqueeze(1)


def _is_asked_for(value: Any) -> bool:
    """Whether an argument is set, that is, not None, False or 0."""
    return isinstance(value, Tensor) or not (value is None or value is False or value == 0)


def language_model(
    module: nn.Module,
    config: dict[str, Any],
    family: Family,
    settings: Callable[[Any], dict[str, Any]],
) -> nn.Module:
    """Return the distributed counterpart of a Hugging Face model, with its values.

    Args:
        config: that of ``smp.tensor_parallelism``.
        settings: makes the distributed model's arguments from Hugging Face's configuration.

    Raises:
        ValueError: this kind of model cannot be distributed.
    """
    theirs: Any = module.config
    own = settings(theirs)
    own |= {name: value for name, value in config.items() if name != "vocab_parallel"}  # only for embeddings
    head = getattr(module, "lm_head", None)
    own |= {"add_lm_head": head is not None}
    if head is not None:
        own |= {"lm_head_bias": head.bias is not None}
        own |= {"tie_weights": head.weight is module.get_input_embeddings().weight}  # type: ignore[operator]
    order = tuple(inspect.signature(type(module).forward).parameters)[1:]
    values = from_huggingface(family, dict(module.named_parameters(remove_duplicate=False)))
    distributed = made_of(lambda: DistributedCausalLM(theirs, order, **own), _tensors(values), module)
    keep_checkpointing(module, distributed.transformer.seq_layers)
    return distributed


def settings_of_gpt(config: Any, **own: Any) -> dict[str, Any]:
    """Return the settings of a configuration with GPT-2's names of sizes, and the model's ``own``."""
    return settings_of(
        num_layers=config.n_layer,
        num_attention_heads=config.n_head,
        attention_head_size=config.n_embd // config.n_head,
        hidden_size=config.n_embd,
        intermediate_size=config.n_inner or 4 * config.n_embd,
        vocab_size=config.vocab_size,
        attention_dropout_prob=config.attn_pdrop,
        hidden_dropout_prob=config.resid_pdrop,
        embedding_dropout_prob=config.embd_pdrop,
        activation=config.activation_function,
        layernorm_epsilon=config.layer_norm_epsilon,
        causal_mask_size=config.n_positions,
        initializer_range=config.initializer_range,
        **own,
    )


def settings_of(**given: Any) -> dict[str, Any]:
    """Return the settings that all these models have in common."""
    return {"pre_layernorm": True, "post_layernorm": False, **given}


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}

"""Hugging Face's causal language models as distributed transformers that are called like the originals."""

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

# What a call may say; of everything else, that it is not asked for.
_TAKEN = frozenset(
    {"input_ids", "attention_mask", "position_ids", "labels", "use_cache", "return_dict", "cache_position"}
)


class DistributedCausalLM(DistributedTransformerLMHead):
    """A distributed language model with the call and the results of a Hugging Face one.

    Args:
        config: Hugging Face's.
        order: names of the original's arguments.
        settings: of :class:`DistributedTransformerLMHead`.
    """

    def __init__(self, config: Any, order: tuple[str, ...], **settings: Any) -> None:
        super().__init__(**settings)
        self.config = config
        self._order = order
        self.has_positions = self.position_embedding is not None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's, for ``input_ids``, ``attention_mask``, ``position_ids`` and ``labels``.

        ``logits`` are None in training with labels, unless the model was created with ``gather_logits=True``;
        the mean of the loss is over this rank's words.

        Raises:
            ValueError: an argument or an output is asked for that the distributed model does not have.
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
        """Refused.

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

    def _makes_cache(self, asked: bool | None) -> bool:
        """Whether the original would; it then takes positions for those of one sequence."""
        return bool(self.config.use_cache if asked is None else asked)

    def _as_original(self, output: Any, has_loss: bool) -> Any:
        from transformers import modeling_outputs

        if self.lm_head is None:
            return modeling_outputs.BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=output)
        loss, logits = output if has_loss else (None, output)
        return modeling_outputs.CausalLMOutputWithCrossAttentions(loss=loss, logits=logits)


def _within_sequences(positions: Tensor) -> Tensor:
    """A mask (True is seen) of several texts in one row, which begin where positions do not go on."""
    text = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return (text.unsqueeze(-1) == text.unsqueeze(-2)).unsqueeze(1)


def _is_asked_for(value: Any) -> bool:
    """Whether an argument has a value other than those that mean nothing: None, False and 0."""
    return isinstance(value, Tensor) or not (value is None or value is False or value == 0)


def language_model(
    module: nn.Module,
    config: dict[str, Any],
    family: Family,
    settings: Callable[[Any], dict[str, Any]],
) -> nn.Module:
    """The distributed counterpart of a Hugging Face model, with its values.

    Args:
        config: of ``smp.tensor_parallelism``.
        settings: makes the distributed model's arguments of Hugging Face's configuration.

    Raises:
        ValueError: the model is of a kind that cannot be distributed.
    """
    theirs: Any = module.config
    own = settings(theirs)
    own |= {name: value for name, value in config.items() if name != "vocab_parallel"}  # for embeddings alone
    head = getattr(module, "lm_head", None)
    own |= {"add_lm_head": head is not None}
    if head is not None:
        own |= {"lm_head_bias": head.bias is not None}
        own |= {"tie_weights": head.weight is module.get_input_embeddings().weight}  # type: ignore[operator]
    order = tuple(inspect.signature(type(module).forward).parameters)[1:]
    values = from_huggingface(family, dict(module.named_parameters(remove_duplicate=False)))
    made = made_of(lambda: DistributedCausalLM(theirs, order, **own), _tensors(values), module)
    keep_checkpointing(module, made.transformer.seq_layers)
    return made


def settings_of_gpt(config: Any, **own: Any) -> dict[str, Any]:
    """The settings of a configuration with GPT-2's names of sizes, and what is the model's ``own``."""
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
    """What all these models have in common."""
    return {"pre_layernorm": True, "post_layernorm": False, **given}


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}

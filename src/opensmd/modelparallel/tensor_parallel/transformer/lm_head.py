"""``smp.nn.DistributedTransformerLMHead``: embeddings, a transformer, and a head over the vocabulary."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opensmd.modelparallel.ranks.shards import ShardedModule
from opensmd.modelparallel.tensor_parallel.collectives import gather, to_split
from opensmd.modelparallel.tensor_parallel.distributed_module import BatchGather, split_parameter
from opensmd.modelparallel.tensor_parallel.layers.cross_entropy import VocabularyCrossEntropy
from opensmd.modelparallel.tensor_parallel.layers.embedding import VocabularyEmbedding
from opensmd.modelparallel.tensor_parallel.random import CommonDropout
from opensmd.modelparallel.tensor_parallel.transformer.blocks import Block, norm
from opensmd.modelparallel.tensor_parallel.transformer.options import EXTRA_OPTIONS
from opensmd.modelparallel.tensor_parallel.transformer.stack import DistributedTransformer

__all__ = ["IGNORED", "DistributedTransformerLMHead"]

IGNORED = -100  # the label of words that do not count


class DistributedTransformerLMHead(Block):
    """A language model: embeddings, ``transformer`` (with ``seq_layers``), and a head tied to the embedding.

    Args:
        num_layers, num_attention_heads, attention_head_size, hidden_size, intermediate_size: sizes; the
            number of ranks must divide the heads and ``intermediate_size``.
        vocab_size, num_positions: sizes of the embeddings; no positions with 0.
        attention_dropout_prob, hidden_dropout_prob: dropout of probabilities; of outputs and the embedding.
        activation: such as ``"gelu"``.
        layernorm_epsilon: of the normalisations.
        num_token_types: 0 for none.
        causal_mask_size: if None, every word sees all; otherwise none sees later ones.
        add_cross_attention: layers attend to other states, too.
        add_lm_head: if False, the result is the hidden states.
        initializer_range, use_normal_initialization: the initial values.
        pre_layernorm: layers normalise their inputs, and there is one more normalisation after the last.
        post_layernorm: layers normalise their outputs, and one more normalisation is on the embedding.
        distribute_embedding: split the vocabulary over the ranks (the default); the loss then needs no logits
            from other ranks.
        tie_weights: whether the head uses the embedding's weight.
        lm_head_bias: whether the head has a bias.
        embedding_dropout_prob: that of the embedding, if not ``hidden_dropout_prob``.
        gather_logits: gather the logits of all ranks; None does so unless a loss is computed in training.
        more: settings of :class:`LayerOptions`, and ``window_sizes``.

    Raises:
        TypeError, ValueError: as in :class:`DistributedTransformerLayer`.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        distribute_embedding: bool = True,
        tie_weights: bool = True,
        lm_head_bias: bool = False,
        embedding_dropout_prob: float | None = None,
        gather_logits: bool | None = None,
        **more: Any,
    ) -> None:
        super().__init__()
        _require_known(more)
        self.vocab_size, self.causal = vocab_size, causal_mask_size is not None
        self.crosses, self.gather_logits = add_cross_attention, gather_logits
        self._embed(
            hidden_size, num_positions, num_token_types, std=initializer_range, split=distribute_embedding
        )
        self.dropout = CommonDropout(
            hidden_dropout_prob if embedding_dropout_prob is None else embedding_dropout_prob
        )
        self.transformer = DistributedTransformer(
            num_layers,
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
            post_layernorm=post_layernorm and not pre_layernorm,  # within a layer, only one of the two
            **more,
        )
        self.embedding_layernorm = norm(self.transformer.options, wanted=post_layernorm)
        self.layernorm = norm(self.transformer.options, wanted=pre_layernorm)
        self.lm_head: _Head | None = None
        if add_lm_head:
            self._add_head(
                _Head(hidden_size, vocab_size, lm_head_bias, initializer_range, split=distribute_embedding),
                tie_weights=tie_weights,
            )

    def _embed(
        self, hidden_size: int, num_positions: int, num_token_types: int, *, std: float, split: bool
    ) -> None:
        """Create the embeddings of words, and of positions and types, if any."""
        self.word_embedding = _embedding(self.vocab_size, hidden_size, std, split=split)
        self.position_embedding = _plain_embedding(num_positions, hidden_size, std) if num_positions else None
        self.token_type_embedding = (
            _plain_embedding(num_token_types, hidden_size, std) if num_token_types else None
        )

    def _add_head(self, head: _Head, *, tie_weights: bool) -> None:
        """Add a head, with what turns its logits into a loss."""
        self.lm_head = head
        self.gather_labels = BatchGather()  # separate from that of the inputs, which may be on another stage
        self.cross_entropy = _WordLoss(self.vocab_size, split=head.split)
        self.whole_logits = _WholeLogits(self.vocab_size) if head.split else None
        if tie_weights:
            head.weight = self.word_embedding.get_parameter("weight")

    def forward(self, *inputs: Any) -> Any:
        """Run the model.

        Args:
            inputs: one tuple, or separate arguments: ``(ids, mask, token types, positions, labels)``, with
                cross attention ``(ids, mask, token types, positions, cross states, cross mask, labels)``;
                missing ones and None are left out. A mask ``[batch, words]`` has 1 for what is masked.

        Returns:
            Hidden states without a head; logits without labels; otherwise ``(loss, logits)``, where logits
            are None in training if they are split (see ``gather_logits``). A causal model compares each word
            with the next one's label.
        """
        if len(inputs) == 1 and isinstance(inputs[0], (tuple, list)):
            inputs = tuple(inputs[0])
        count = 7 if self.crosses else 5
        if len(inputs) > count:
            raise TypeError(f"DistributedTransformerLMHead: {len(inputs)} inputs were given, at most {count}")
        given = [*inputs, *[None] * (count - len(inputs))]
        labels = given.pop()
        ids, mask, types, positions, *cross = self.enter(given)
        hidden = self._embedded(ids, types, positions)
        rest = (cross[0], mask, cross[1]) if cross else (mask,)
        hidden = self.transformer((hidden, *rest))[0]
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        if self.lm_head is None:
            return self.leave(hidden)
        return self._results(self.lm_head(hidden), labels)

    def _embedded(self, ids: Tensor, types: Tensor | None, positions: Tensor | None) -> Tensor:
        hidden: Tensor = self.word_embedding(ids)
        if self.position_embedding is not None:
            if positions is None:
                positions = torch.arange(ids.shape[-1], device=ids.device)
            hidden = hidden + self.position_embedding(positions)
        if self.token_type_embedding is not None:
            hidden = hidden + self.token_type_embedding(torch.zeros_like(ids) if types is None else types)
        if self.embedding_layernorm is not None:
            hidden = self.embedding_layernorm(hidden)
        dropped: Tensor = self.dropout(hidden)
        return dropped

    def _results(self, logits: Tensor, labels: Tensor | None) -> Any:
        if labels is None:
            return self.leave(self._whole(logits))
        wanted = self.gather_logits
        if wanted is None:
            wanted = self.whole_logits is None or not self.training
        loss = self._loss(logits, labels)
        return loss, self.leave(self._whole(logits)) if wanted else None

    def _whole(self, logits: Tensor) -> Tensor:
        if self.whole_logits is not None:
            logits = self.whole_logits(logits)
        return logits

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over this rank's counted words."""
        every = self.gather_labels(labels) if self.scales_batch else labels
        own = labels
        if self.causal:
            logits, every, own = logits[:, :-1], every[:, 1:], own[:, 1:]
        losses = self.leave(self.cross_entropy(logits, every))
        return losses.sum() / (own != IGNORED).sum()


def _require_known(more: Collection[str]) -> None:
    unknown = sorted(set(more) - EXTRA_OPTIONS - {"window_sizes"})
    if unknown:
        raise TypeError(f"smp.nn.DistributedTransformerLMHead takes no {', '.join(unknown)}")


class _Head(ShardedModule):
    """Logits of this rank's words, or of all."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, vocab_size: int, bias: bool, std: float, *, split: bool) -> None:
        super().__init__()
        self.split = split
        whole = nn.Linear(hidden_size, vocab_size, bias)
        nn.init.normal_(whole.weight, std=std)
        if split:
            split_parameter(self, "weight", whole.weight, 0)
        else:
            self.weight = nn.Parameter(whole.weight.detach())
        if not bias:
            self.bias = None
        elif split:
            split_parameter(self, "bias", whole.bias, 0)
        else:
            self.bias = nn.Parameter(whole.bias.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[..., hidden_size]`` to ``[..., words]``."""
        return F.linear(to_split(hidden) if self.split else hidden, self.weight, self.bias)


class _WholeLogits(nn.Module):
    """Gathers the ranks' logits."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, logits: Tensor) -> Tensor:
        """Map ``[..., this rank's words]`` to ``[..., vocab_size]``."""
        return gather(logits, -1, self.vocab_size)


class _WordLoss(nn.Module):
    """The loss of every word, from split or whole logits."""

    def __init__(self, vocab_size: int, *, split: bool) -> None:
        super().__init__()
        self.of_split = VocabularyCrossEntropy(vocab_size, IGNORED) if split else None

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Map ``[batch, words, vocabulary]`` and ``[batch, words]`` to ``[batch, words]``."""
        if self.of_split is not None:
            return self.of_split(logits, labels)  # type: ignore[no-any-return]
        flat = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return flat.view(labels.shape)


def _embedding(rows: int, size: int, std: float, *, split: bool) -> nn.Module:
    return VocabularyEmbedding(rows, size, std=std) if split else _plain_embedding(rows, size, std)


def _plain_embedding(rows: int, size: int, std: float) -> nn.Embedding:
    embedding = nn.Embedding(rows, size)
    nn.init.normal_(embedding.weight, std=std)
    return embedding

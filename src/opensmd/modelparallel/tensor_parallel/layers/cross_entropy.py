"""Cross entropy of logits split over the vocabulary: three numbers per word travel, no logits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from opensmd.modelparallel.ranks.shards import bounds
from opensmd.modelparallel.tensor_parallel.collectives import all_reduced
from opensmd.modelparallel.tensor_parallel.layers.indices import require_within
from opensmd.modelparallel.tensor_parallel.tensor_group import tensor_rank, tensor_size

__all__ = ["VocabularyCrossEntropy", "vocabulary_cross_entropy"]


class VocabularyCrossEntropy(nn.Module):
    """The loss of each word, given this rank's logits.

    Args:
        vocab_size: that of the whole vocabulary.
        ignore_index: words with this label have the loss 0.
    """

    def __init__(self, vocab_size: int, ignore_index: int = -100) -> None:
        super().__init__()
        self.vocab_size, self.ignore_index = vocab_size, ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """``[..., this rank's words]`` and ``[...]`` to ``[...]``."""
        return vocabulary_cross_entropy(logits, labels, self.vocab_size, self.ignore_index)


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Compute ``F.cross_entropy(..., reduction="none")`` of split logits, in float32; all ranks must call.

    Raises:
        RuntimeError: a label is not in the vocabulary.
    """
    if tensor_size() == 1:
        flat = F.cross_entropy(
            logits.flatten(0, -2).float(), labels.flatten(), ignore_index=ignore_index, reduction="none"
        )
        return flat.view(labels.shape)
    require_within(labels, vocab_size, "a label", besides=ignore_index)
    rows = bounds(vocab_size, tensor_size(), tensor_rank())
    if not logits.shape[-1]:  # the last ranks may have no words; one of probability zero makes no difference
        logits = F.pad(logits, (0, 1), value=-math.inf)
    result: Tensor = _CrossEntropy.apply(logits, labels, rows, ignore_index)  # type: ignore[no-untyped-call]
    return result


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: tuple[int, int], ignore_index: int) -> Tensor:
        wide = logits.float()
        largest = all_reduced(wide.amax(-1), dist.ReduceOp.MAX)
        exponents = (wide - largest.unsqueeze(-1)).exp()
        ignored = labels == ignore_index
        elsewhere = (labels < rows[0]) | (labels >= rows[1])
        local = (labels - rows[0]).masked_fill(elsewhere, 0).unsqueeze(-1)
        wanted = wide.gather(-1, local).squeeze(-1) - largest
        both = all_reduced(torch.stack([exponents.sum(-1), wanted.masked_fill(elsewhere, 0)]))
        total, wanted = both[0], both[1]
        probabilities = exponents.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, elsewhere, ignored)
        ctx.dtype = logits.dtype
        return (total.log() - wanted).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, elsewhere, ignored = ctx.saved_tensors
        weight = gradients[0].masked_fill(ignored, 0).unsqueeze(-1)
        gradient = probabilities * weight
        gradient.scatter_add_(-1, local, -weight.masked_fill(elsewhere.unsqueeze(-1), 0))
        return gradient.to(ctx.dtype), None, None, None

"""Embeddings split over the vocabulary or over their dimensions: ``smp.nn.DistributedEmbedding``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.ranks.shards import ShardedModule, bounds
from opensmd.modelparallel.state import state
from opensmd.modelparallel.tensor_parallel.collectives import gather, summed_in_place
from opensmd.modelparallel.tensor_parallel.distributed_module import DistributedModule, split_parameter
from opensmd.modelparallel.tensor_parallel.layers.indices import require_within
from opensmd.modelparallel.tensor_parallel.layers.linear import require_divisible
from opensmd.modelparallel.tensor_parallel.tensor_group import tensor_rank, tensor_size

__all__ = ["DistributedEmbedding", "VocabularyEmbedding"]


class VocabularyEmbedding(ShardedModule):
    """An embedding in which each rank has some rows; common indices, common output.

    Args:
        num_embeddings, embedding_dim: of the whole embedding; any number of rows.
        std: that of the initial values.
    """

    weight: nn.Parameter

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float) -> None:
        super().__init__()
        whole = torch.empty(num_embeddings, embedding_dim)
        nn.init.normal_(whole, std=std)
        self.num_embeddings = num_embeddings
        self.rows = bounds(num_embeddings, tensor_size(), tensor_rank())
        split_parameter(self, "weight", whole, 0)

    def forward(self, indices: Tensor) -> Tensor:
        """``[...]`` to ``[..., embedding_dim]``."""
        return rows_of(self.weight, indices, self.rows, size=self.num_embeddings)


class DistributedEmbedding(DistributedModule):
    """``torch.nn.Embedding`` whose dimensions, or whose rows, are split over the tensor-parallel ranks.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: as in
            torch, for the whole embedding.
        _weight: the initial whole weight.
        initializer_range: standard deviation of the initial values otherwise.
        vocab_parallel: split the rows instead of the dimensions.
        _skip_allgather: return only the rank's own dimensions.
        _skip_scatter_and_merge: return the output for the batches of all ranks.

    Raises:
        ValueError: the number of ranks does not divide ``embedding_dim``; ``max_norm``, which needs whole
            rows, is given although they are split; or gradients are sparse and there are replicas.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
        *,
        vocab_parallel: bool = False,
    ) -> None:
        super().__init__()
        name = "smp.nn.DistributedEmbedding"
        if not vocab_parallel:
            require_divisible(name, embedding_dim=embedding_dim)
            if max_norm is not None and tensor_size() > 1:
                raise ValueError(f"{name}: max_norm needs whole rows; give vocab_parallel=True, too")
        elif _skip_allgather:
            raise ValueError(f"{name}: _skip_allgather has no meaning with vocab_parallel=True")
        if sparse and state.groups.size(CommGroup.RDP_GROUP) > 1:
            raise ValueError(f"{name}: sparse gradients of slices cannot be averaged over replicas")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.sparse = max_norm, sparse
        self.options: dict[str, Any] = {"max_norm": max_norm, "norm_type": norm_type}
        self.options |= {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
        self.skips_gather, self.skips_scatter = _skip_allgather, _skip_scatter_and_merge
        self.vocab_parallel = vocab_parallel
        self.rows = bounds(num_embeddings, tensor_size(), tensor_rank())
        if _weight is None:
            _weight = torch.empty(num_embeddings, embedding_dim)
            nn.init.normal_(_weight, std=initializer_range)
            if self.padding_idx is not None and not _weight.is_meta:
                _weight[self.padding_idx].fill_(0)
        self.split_parameter("weight", _weight, 0 if vocab_parallel else 1)

    def forward(self, input: Tensor) -> Tensor:
        """``[...]`` to ``[..., embedding_dim]``."""
        alone = input.dim() == 0  # without a batch
        indices = self.gather_batch(input.unsqueeze(0) if alone else input)
        if self.vocab_parallel:
            output = rows_of(
                self.weight,
                indices,
                self.rows,
                size=self.num_embeddings,
                padding_idx=self.padding_idx,
                **self.options,
            )
        else:
            output = F.embedding(indices, self.weight, self.padding_idx, **self.options)
            if not self.skips_gather:
                output = gather(output, -1, self.embedding_dim)
        if not self.skips_scatter:
            output = self.scatter_batch(output)
        return output.squeeze(0) if alone else output

    def extra_repr(self) -> str:
        """Return the sizes of the whole embedding."""
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={tensor_size()}"


def rows_of(
    weight: Tensor,
    indices: Tensor,
    rows: tuple[int, int],
    *,
    size: int,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows, of which each rank has those in ``rows``, and add up the ranks' rows and zeros.

    Raises:
        RuntimeError: there is no such row on any rank.
    """
    options = (max_norm, norm_type, scale_grad_by_freq, sparse)
    if tensor_size() == 1:
        return F.embedding(indices, weight, padding_idx, *options)
    require_within(indices, size, "an index of an embedding")
    start, stop = rows
    elsewhere = (indices < start) | (indices >= stop)
    own_padding = None
    if padding_idx is not None and start <= padding_idx < stop:
        own_padding = padding_idx - start
    # The first two depend on what is looked up; and the last ranks may have no rows.
    if max_norm is not None or scale_grad_by_freq or not weight.shape[0]:
        present = ~elsewhere
        rows_found = F.embedding((indices - start)[present], weight, own_padding, *options)
        zeros = rows_found.new_zeros(*indices.shape, weight.shape[1])
        return summed_in_place(zeros.index_put((present,), rows_found))
    local = (indices - start).masked_fill(elsewhere, 0)
    vectors = F.embedding(local, weight, own_padding, *options)
    return summed_in_place(vectors.masked_fill(elsewhere.unsqueeze(-1), 0))

"""Gradients travel in buckets of one dtype."""

from __future__ import annotations

import torch

from opensmd.collectives.gradients.flat import copy_back, flatten, in_buckets


def test_buckets_hold_one_dtype_and_stay_below_their_limit() -> None:
    tensors = [torch.ones(4), torch.ones(2).double(), torch.full((3, 2), 2.0), torch.ones(100), torch.ones(1)]
    buckets = in_buckets(tensors, 40)
    assert [[one.numel() for one in bucket] for bucket in buckets] == [[4, 6], [100], [1], [2]]
    flat = flatten(buckets[0])
    assert flat.tolist() == [1.0] * 4 + [2.0] * 6
    copy_back(flat * 3, buckets[0])
    assert tensors[2].tolist() == [[6.0, 6.0]] * 3

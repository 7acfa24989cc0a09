"""Sizes of buckets that torch's reducer would misunderstand."""

from __future__ import annotations

import math

import pytest

from opensmd.collectives.gradients.buckets import require_bucket_size


@pytest.mark.parametrize("size", [25, 0.5, 1e9])
def test_a_positive_size_is_taken(size: float) -> None:
    require_bucket_size(size, "DDP")


@pytest.mark.parametrize("size", [0, -1, math.inf, math.nan, True, "25", None])
def test_anything_else_is_refused_with_what_was_expected(size: object) -> None:
    with pytest.raises(ValueError, match=r"DDP: bucket_cap_mb must be a positive number of MiB, got "):
        require_bucket_size(size, "DDP")


def test_none_stands_for_a_default_where_there_is_one() -> None:
    require_bucket_size(None, "DDP", or_none=True)
    with pytest.raises(ValueError, match="of MiB or None, got 0"):
        require_bucket_size(0, "DDP", or_none=True)

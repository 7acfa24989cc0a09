"""Numbers in at least float32."""

from __future__ import annotations

import pytest
import torch

from opensmd.upcast import upcast


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(narrow: torch.dtype) -> None:
    assert upcast(torch.ones(2, dtype=narrow)).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool])
def test_what_is_wide_or_no_fraction_stays_the_same_tensor(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, dtype=dtype)
    assert upcast(tensor) is tensor

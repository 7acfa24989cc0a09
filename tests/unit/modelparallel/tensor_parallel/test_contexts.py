"""Which modules are marked to be distributed."""

from __future__ import annotations

import pytest
from torch import nn

from opensmd.modelparallel.tensor_parallel.contexts import (
    Wish,
    set_tensor_parallelism,
    tensor_parallelism,
    wish_of,
)


def test_modules_created_in_a_context_are_marked_and_the_innermost_counts() -> None:
    with tensor_parallelism(attention_in_fp32=True):
        inside = nn.Linear(1, 1)
        with tensor_parallelism(False):
            exempt = nn.Linear(1, 1)
        after = nn.Linear(1, 1)
    assert wish_of(inside) == wish_of(after) == Wish(True, {"attention_in_fp32": True})
    assert wish_of(exempt) is None and wish_of(nn.Linear(1, 1)) is None


def test_an_existing_module_is_marked_with_all_in_it_and_can_be_unmarked() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ReLU())
    set_tensor_parallelism(model, fast=True)
    set_tensor_parallelism(model[1], False)
    assert wish_of(model[0][0]) == Wish(True, {"fast": True}) and wish_of(model[1]) is None


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got 3"):
        set_tensor_parallelism(3)  # type: ignore[arg-type]

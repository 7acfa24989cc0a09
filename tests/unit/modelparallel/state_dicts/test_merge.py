"""Partial state dicts become full ones."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.state_dicts.merge import (
    COUNT,
    PARTIAL,
    SLICES,
    is_partial,
    marked,
    merge_optimizers,
    merge_trees,
    whole_later,
    with_versions,
)

WHOLE = torch.arange(12.0).view(4, 3)


def part(**entries: Any) -> dict[str, Any]:
    return {PARTIAL: True, **entries}


def test_stages_are_united_wherever_they_are_in_what_was_saved() -> None:
    first, second = part(a=WHOLE), part(b=WHOLE + 1)
    saved = [{"model": one, "epoch": number} for number, one in enumerate((first, second))]
    merged = merge_trees(saved)
    assert merged == {"model": {"a": first["a"], "b": second["b"]}, "epoch": 0}
    assert not is_partial(merged["model"])
    assert merge_trees([part(a=1), part(a=2)]) == {"a": 1}, "of what both have, the first stage's counts"


def test_slices_of_ranks_that_shared_a_tensor_become_the_whole() -> None:
    slices = [["weight", 0, 4]]
    parts = [
        part(weight=WHOLE[:2], bias=1, **{SLICES: slices}),
        part(weight=WHOLE[2:], bias=1, **{SLICES: slices}),
    ]
    merged = merge_trees(parts, tensor=2)
    assert torch.equal(merged["weight"], WHOLE) and merged["bias"] == 1
    later = whole_later(parts, tensor=2)
    assert torch.equal(later["weight"](), WHOLE) and set(later) == {"weight", "bias"}
    along_columns = [
        part(w=WHOLE[:, :2], **{SLICES: [["w", 1, 3]]}),
        part(w=WHOLE[:, 2:], **{SLICES: [["w", 1, 3]]}),
    ]
    assert torch.equal(merge_trees(along_columns, tensor=2)["w"], WHOLE)


def test_parts_that_do_not_make_a_whole_are_refused() -> None:
    short = [part(w=WHOLE[:1], **{SLICES: [["w", 0, 4]]}), part(w=WHOLE[2:], **{SLICES: [["w", 0, 4]]})]
    with pytest.raises(SMPCheckpointError, match=r"w: 2 slices of shapes .* not the whole of 4 along axis 0"):
        merge_trees(short, tensor=2)
    with pytest.raises(
        SMPCheckpointError, match=r"do not say which; load them with the same degrees \(1 part"
    ):
        merge_trees([part(w=1), part(w=2)], tensor=2)
    with pytest.raises(SMPCheckpointError, match="some parts of this checkpoint are partial"):
        merge_trees([part(w=1), {"w": 1}])


def test_an_optimizers_parts_have_its_numbers_in_order_and_all_groups() -> None:
    groups = [{"params": [0, 1], "lr": 0.1}, {"params": [2], "lr": 0.2}]
    parts = [
        part(state={2: {"step": 1}, "shared": 7}, param_groups=groups),
        part(state={0: {"step": 3}, 1: {"step": 2}}, param_groups=groups),
    ]
    merged = merge_optimizers(parts)
    assert list(merged["state"]) == [0, 1, 2, "shared"]
    assert merged["state"][0] == {"step": 3} and merged["state"]["shared"] == 7
    assert merged["param_groups"] == groups and PARTIAL not in merged
    assert merge_trees(parts) == merged
    other = part(state={}, param_groups=[{"params": [0, 1, 2]}])
    with pytest.raises(SMPCheckpointError, match=r"groups of \[2, 1\] parameters, part 1 of \[3\]"):
        merge_optimizers([parts[0], other])


def test_marks_go_and_entries_of_the_same_name_stay() -> None:
    assert marked({PARTIAL: True, SLICES: [], COUNT: 2, "w": 1}) == {"w": 1}
    parameter = torch.ones(1)
    assert marked({COUNT: parameter}) == {COUNT: parameter}, "a parameter may be called that"


def test_the_versions_of_modules_stay() -> None:
    source: Any = OrderedDict(a=1)
    source._metadata = {"": {"version": 2}}
    assert with_versions({"b": 2}, source)._metadata == {"": {"version": 2}}  # type: ignore[attr-defined]
    assert type(with_versions({"b": 2}, {})) is dict

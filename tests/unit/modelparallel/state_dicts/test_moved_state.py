"""State goes where loading it would put it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.state_dicts.moved_state import move_state


def test_state_comes_to_its_parameter_and_counts_only_for_those_that_count_there() -> None:
    gone, fused, here = (nn.Parameter(torch.ones(2, device=where)) for where in ("meta", "meta", "cpu"))
    entries: dict[Any, Any] = {
        each: {"step": torch.tensor(3.0), "moment": torch.ones(2), "name": "x"}
        for each in (gone, fused, here)
    }
    entries["rounds"] = 7
    groups = [{"params": [gone, here]}, {"params": [fused], "fused": True}]
    before = dict(entries[here])
    move_state(entries, groups)
    found = [[entries[each][key].device.type for key in ("step", "moment")] for each in (gone, fused)]
    assert found == [["cpu", "meta"], ["meta", "meta"]]
    assert all(entries[here][key] is value for key, value in before.items())

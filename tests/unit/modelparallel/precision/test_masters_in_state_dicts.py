"""Masters in an optimizer's state dict."""

from __future__ import annotations

import torch

from opensmd.modelparallel.precision.masters_in_state_dicts import MASTER, SCALE, split_masters


def test_without_its_masters_a_state_dict_is_one_of_plain_pytorch() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    given = {
        "state": {0: {"step": 1, MASTER: one}, 1: {MASTER: two}, 2: {"step": 3}, "own": 7},
        "param_groups": [{"params": [0, 1, 2]}],
        SCALE: {"loss_scale": 2.0},
    }
    masters, rest = split_masters(given)
    assert masters == {0: one, 1: two}
    assert rest == {
        "state": {0: {"step": 1}, 2: {"step": 3}, "own": 7},
        "param_groups": [{"params": [0, 1, 2]}],
    }
    assert given["state"][0] == {"step": 1, MASTER: one}, "what was given stays"  # type: ignore[index]

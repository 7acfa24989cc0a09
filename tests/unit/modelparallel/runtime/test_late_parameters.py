"""What may take the place of a parameter between steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.late_parameters import PlacedParameters


def test_frozen_parameters_may_be_set_anew() -> None:
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    placed = PlacedParameters(module, home_of=lambda name: 0)
    for _ in range(2):
        module.weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        placed.require_no_others()


@pytest.mark.parametrize(
    "shape, frozen, trained", [((2, 2), False, False), ((2, 2), True, True), ((3, 2), True, False)]
)
def test_others_may_not(shape: tuple[int, ...], frozen: bool, trained: bool) -> None:
    """Those that were or are trained, or of another shape."""
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(not frozen)
    placed = PlacedParameters(module, home_of=lambda name: 0)
    module.weight = nn.Parameter(torch.ones(shape), requires_grad=trained)
    with pytest.raises(SMPError, match="'weight' was added"):
        placed.require_no_others()


def test_layers_move_only_to_names_of_the_same_rank() -> None:
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    placed = PlacedParameters(module, home_of=lambda name: int(name[0] == "2"))
    first, second, last = module
    module[0], module[1] = second, first
    placed.require_no_others()
    del module[0]
    module[0], module[1] = first, last
    with pytest.raises(
        SMPError, match=r"'2\.weight' was moved to '1\.weight' .* rank 1, .* on 0: state dicts"
    ):
        placed.require_no_others()

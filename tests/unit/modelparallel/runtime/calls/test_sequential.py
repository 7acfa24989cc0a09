"""Which split Sequentials call several modules as one, or pass those of other ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opensmd.modelparallel.runtime.calls.sequential import Sequences


def layers(*homes: int) -> tuple[nn.Sequential, dict[nn.Module, int]]:
    """A Sequential, and the rank of each of its layers."""
    whole = nn.Sequential(*[nn.Linear(2, 2) for _ in homes])
    return whole, dict(zip(whole, homes, strict=True))


@pytest.mark.parametrize(
    ("homes", "rank", "has_forward"),
    [
        ((0, 1), 0, True),  # passes the second
        ((0, 1), 1, True),
        ((0, 1, 2), 1, True),
        ((0, 0, 1), 0, True),  # and calls the first two as one
        ((0,), 0, False),
    ],
)
def test_modules_of_other_ranks_can_be_passed_one_by_one_too(
    homes: tuple[int, ...], rank: int, has_forward: bool
) -> None:
    whole, of_layers = layers(*homes)
    forwards = Sequences({"": whole}, of_layers, rank).forwards(alone=False)
    assert (whole in forwards) == has_forward
    if has_forward:
        x = torch.ones(3, 2)  # outside steps everything is called
        torch.testing.assert_close(forwards[whole](x), whole(x))


def test_a_single_microbatch_passes_nothing_as_it_may_switch_modules_to_another_mode() -> None:
    whole, homes = layers(0, 1)
    assert not Sequences({"": whole}, homes, 0).forwards(alone=True)


def test_a_module_whose_calls_somebody_watches_is_called() -> None:
    whole, homes = layers(0, 1)
    whole[1].register_forward_hook(lambda *_: None)
    assert not Sequences({"": whole}, homes, 0).forwards(alone=False)

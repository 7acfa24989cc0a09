"""Tensors that were gathered are told from those that others have."""

from __future__ import annotations

import torch

from opensmd.modelparallel.ranks.gathered import newly_gathered, noting_gathered


def test_what_is_gathered_meanwhile_is_known_by_its_memory() -> None:
    before = newly_gathered(torch.ones(4))
    with noting_gathered() as found:
        whole = newly_gathered(torch.ones(6).view(2, 3))
        other = torch.ones(6)
    assert found.has_all_of(whole) and found.has_all_of(whole.view(6))
    assert not found.has_all_of(other) and not found.has_all_of(before)


def test_a_part_of_what_was_gathered_is_not_the_whole() -> None:
    with noting_gathered() as found:
        padded = newly_gathered(torch.ones(8)[:7])
        whole = newly_gathered(torch.ones(2, 3))
    assert not found.has_all_of(padded)
    assert not found.has_all_of(whole[0]) and not found.has_all_of(whole.t())


def test_a_rank_that_wants_nothing_keeps_nothing() -> None:
    with noting_gathered(is_wanted=False):
        whole = newly_gathered(torch.ones(2, 3))
    assert whole.is_meta and whole.shape == (2, 3)


def test_memory_that_is_used_again_is_somebody_elses() -> None:
    with noting_gathered() as found:
        for _ in range(100):
            newly_gathered(torch.ones(1000))
            later = torch.ones(1000)
            assert not found.has_all_of(later)

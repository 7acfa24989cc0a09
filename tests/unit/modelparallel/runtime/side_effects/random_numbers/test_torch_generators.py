"""Random numbers of microbatches: every generator in use has a state for each of them."""

from __future__ import annotations

import torch
from torch import nn

from opensmd.modelparallel.runtime.calls.operations import RANDOM
from opensmd.modelparallel.runtime.side_effects.random_numbers.torch_generators import (
    RandomPerMicrobatch,
    ReplicatedRandom,
    seed_of_step,
)

Drawn = list[tuple[float, ...]]


def draw(generators: list[torch.Generator]) -> tuple[float, ...]:
    return tuple(torch.rand((), generator=generator).item() for generator in generators)


def made() -> list[torch.Generator]:
    """The CPU's generator and, in the place of an accelerator's, another one."""
    return [torch.Generator().manual_seed(number) for number in range(2)]


def in_turns(order: list[int]) -> tuple[dict[int, Drawn], Drawn]:
    generators, drawn = made(), dict[int, Drawn]()
    random, own = ReplicatedRandom(generators), []
    random.begin_step(3)
    for microbatch in order:
        own.append(draw(generators))
        with random.of(microbatch):
            drawn.setdefault(microbatch, []).append(draw(generators))
    return drawn, own


def test_microbatches_draw_the_same_in_whichever_order_from_all_generators() -> None:
    first, own = in_turns([0, 1, 0, 1])
    second, _ = in_turns([1, 1, 0, 0])
    assert first == second
    both = first[0] + first[1]
    for generator in range(2):
        assert len({numbers[generator] for numbers in both}) == 4
    rank = made()
    assert own == [draw(rank) for _ in range(4)]


def test_every_step_draws_anew_until_torch_is_seeded_again() -> None:
    generators, drawn = made(), set()
    random = ReplicatedRandom(generators)
    torch.manual_seed(3)
    for _ in range(3):
        random.begin_step(seed_of_step())
        RandomPerMicrobatch(generators).end_step()
        with random.of(0):
            drawn.add(draw(generators))
    assert len(drawn) == 3
    torch.manual_seed(3)
    random.begin_step(seed_of_step())
    with random.of(0):
        assert draw(generators) in drawn


def test_a_rank_has_its_own_state_again_after_the_step() -> None:
    generators = made()
    wanted = draw(made())
    own = RandomPerMicrobatch(generators)
    own.begin(0, backward=False)
    first = draw(generators)
    own.suspend(0)
    own.begin(1, backward=False)
    draw(generators)
    own.resume(0)
    second = draw(generators)
    own.end_step()
    assert draw(generators) == wanted and len({first, second, wanted}) == 3


def test_what_torch_tags_as_random_and_what_initialises_draws_alike_on_all_ranks() -> None:
    for one in (torch.rand, torch.randn_like, torch._standard_gamma, torch.lstm, torch.Tensor.normal_):
        assert one in RANDOM
    for one in (nn.functional.dropout, nn.functional.multi_head_attention_forward, nn.init.xavier_uniform_):
        assert one in RANDOM
    assert torch.add not in RANDOM and nn.init.zeros_ not in RANDOM

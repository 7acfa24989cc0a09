"""What a rank needs memory for, counted another way: all ranks together have what the model needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opensmd.modelparallel.planning.plan import StageLoad
from opensmd.modelparallel.planning.rank_bytes import RankBytes, Sharing, bytes_of_rank

PARAMETERS, ACTIVATIONS = 960, 720
LOAD = StageLoad(
    parameter_bytes=PARAMETERS,
    training_bytes=4 * PARAMETERS,
    activation_bytes=ACTIVATIONS // 3,
    in_flight=3,
)


def of(**sharing: object) -> RankBytes:
    return bytes_of_rank(LOAD, Sharing(**sharing))  # type: ignore[arg-type]


def test_adam_in_fp32_takes_four_times_the_parameters() -> None:
    found = of()
    assert (found.parameters, found.gradients, found.masters, found.optimizer) == (960, 960, 0, 1920)
    assert found.activations == ACTIVATIONS and found.total == 4 * PARAMETERS + ACTIVATIONS


def test_16_bits_take_20_bytes_a_parameter_and_half_of_the_activations() -> None:
    found = of(half=True)
    assert found.total - found.activations == 20 * PARAMETERS / 4
    assert found.activations == ACTIVATIONS / 2


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_ranks_that_share_have_together_what_one_has(
    tensor: int, sharded: int, copies: int, half: bool
) -> None:
    alone = of(half=half)
    replicas = sharded * copies
    found = of(tensor=tensor, sharded=sharded, replicas=replicas, half=half)
    for name in ("parameters", "gradients", "masters", "optimizer"):
        assert getattr(found, name) * tensor * sharded == pytest.approx(getattr(alone, name))
    assert found.activations * tensor == pytest.approx(alone.activations)
    state = of(tensor=tensor, replicas=replicas, shard_optimizer=True, half=half)
    assert state.optimizer * tensor * replicas == pytest.approx(alone.optimizer)
    assert state.parameters * tensor == pytest.approx(alone.parameters)


def test_replicas_must_make_whole_groups() -> None:
    with pytest.raises(ValueError, match="3 replicas cannot be cut into groups of 2"):
        Sharing(replicas=3, sharded=2)

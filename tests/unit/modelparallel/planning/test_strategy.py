"""The whole strategy, chosen by prediction."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.planning.derived_traces import layers_of
from opensmd.modelparallel.planning.schedules.names import Pipeline
from opensmd.modelparallel.planning.strategy import Choices, Strategy, strategies
from opensmd.modelparallel.planning.trace import ModelTrace
from opensmd.modelparallel.planning.units import Link, Links

BATCH = 8


class Block(nn.Module):
    """Keeps much more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 512)
        self.narrow = nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(torch.tanh(torch.tanh(torch.tanh(self.wide(x)))))
        return out


@pytest.fixture(scope="module")
def trace() -> ModelTrace:
    model = nn.Sequential(*[Block() for _ in range(8)])
    x = torch.ones(BATCH, 64, 64)
    return capture(model, lambda: model(x).square().mean())


def allowed(**choices: object) -> Choices:
    return Choices(**{"ranks": 4, "batch": BATCH, **choices})  # type: ignore[arg-type]


def combination(strategy: Strategy) -> tuple[int, int, int, bool]:
    return strategy.partitions, strategy.replicas, strategy.microbatches, strategy.checkpointing


@pytest.fixture(scope="module")
def free(trace: ModelTrace) -> list[Strategy]:
    """All of them."""
    return strategies(trace, allowed())


def test_slow_links_are_spared_by_having_few_stages_or_few_replicas_on_both_sides(trace: ModelTrace) -> None:
    slow = Link(message=1e-3, rate=1e5)
    averages = strategies(trace, allowed(links=lambda _: Links(slow, averaging=1.0)))[0]
    assert averages.replicas == 1
    apart = Links(slow, frozenset({(0, 1)}))
    stages = strategies(trace, allowed(links=lambda partitions: apart if partitions > 1 else Links()))[0]
    assert stages.partitions == 1


def test_every_strategy_uses_all_ranks_and_shares_out_the_batch(free: list[Strategy]) -> None:
    assert {each.partitions for each in free} == {1, 2, 4}
    named = {"interleaved", "zero_bubble", "v", "1f1b", "simple"}
    assert named <= {each.pipeline for each in free} <= {*named, "searched"}
    for each in free:
        assert each.partitions * each.replicas == 4
        assert BATCH % (each.replicas * each.microbatches) == 0
        assert each.plan.stages == each.partitions and -0.01 < each.bubble < 1
    assert [each.seconds for each in free] == sorted(each.seconds for each in free)


def test_with_less_memory_a_slower_strategy_is_chosen_and_the_smallest_if_none_fits(
    trace: ModelTrace, free: list[Strategy]
) -> None:
    limit = free[0].rank_bytes * 0.7
    found = [each for each in strategies(trace, allowed(memory_bytes=limit)) if each.pipeline != "searched"]
    fitting = [each for each in free if each.rank_bytes <= limit and each.pipeline != "searched"]
    assert found == fitting and found[0] != free[0]
    least = strategies(trace, allowed(memory_bytes=1.0, partitions={2}))
    assert least[0].rank_bytes == min(each.rank_bytes for each in free if each.partitions == 2)


def test_checkpoints_are_set_around_repeated_layers_and_cost_time_for_memory(trace: ModelTrace) -> None:
    assert layers_of(trace) == [str(layer) for layer in range(8)]
    alike = allowed(partitions={2}, microbatches={2}, pipelines={"zero_bubble"})
    without, with_checkpoints = sorted(strategies(trace, alike), key=lambda each: each.checkpointing)
    assert (without.checkpointing, with_checkpoints.checkpointing) == (False, True)
    assert with_checkpoints.rank_bytes < without.rank_bytes
    # forwards run twice, backwards once; those of tanh take most of this model's time
    assert 1.1 < with_checkpoints.seconds / without.seconds < 2


def test_what_is_given_is_kept_and_what_cannot_be_is_refused(trace: ModelTrace) -> None:
    found = strategies(trace, allowed(partitions={2}, microbatches={2}, checkpointing={False}))
    assert {combination(each) for each in found} == {(2, 2, 2, False)}
    settings = {each.pipeline: each.settings() for each in found}
    expected = {"pipeline_parallel_degree": 2, "microbatches": 2, "pipeline": "v", "ddp": True}
    assert settings["v"] == {**expected, "memory_weight": 0.0}
    assert settings["zero_bubble"]["active_microbatches"] == 3
    with pytest.raises(ValueError, match="partitions must divide the 4 ranks"):
        strategies(trace, allowed(partitions={3}))
    with pytest.raises(ValueError, match="got ranks=0 and batch=8"):
        allowed(ranks=0)


@pytest.mark.parametrize("pipeline", get_args(Pipeline))
def test_every_schedule_can_be_asked_for(trace: ModelTrace, pipeline: Pipeline) -> None:
    found = strategies(trace, allowed(pipelines={pipeline}, partitions={2}, microbatches={4}))
    assert {each.pipeline for each in found} == {pipeline}
    assert {each.partitions for each in found} == {2} and found[0].seconds > 0


def test_a_little_memory_is_enough_with_fewer_microbatches_in_flight(trace: ModelTrace) -> None:
    """The same schedule with as few as 1F1B has, and 1F1B itself, which keeps less on later ranks."""
    way = allowed(partitions={4}, microbatches={8}, checkpointing={False})
    found = {(each.pipeline, each.active_microbatches): each for each in strategies(trace, way)}
    roomy, lean = found["interleaved", 6], found["interleaved", 4]
    assert lean.rank_bytes < roomy.rank_bytes and lean.settings()["active_microbatches"] == 4
    assert "active_microbatches" not in roomy.settings()
    assert found["1f1b", 4].rank_bytes <= lean.rank_bytes
    assert found["1f1b", 4].seconds > lean.seconds


def test_how_many_microbatches_may_be_in_flight_is_kept(trace: ModelTrace) -> None:
    given = allowed(active_microbatches=3, checkpointing={False})
    found = strategies(trace, given)
    assert {each.active_microbatches for each in found} == {3}
    assert {each.partitions for each in found} == {1, 2}, "four partitions need four"
    with pytest.raises(ValueError, match="at least as many as partitions"):
        strategies(trace, allowed(active_microbatches=3, partitions={4}))

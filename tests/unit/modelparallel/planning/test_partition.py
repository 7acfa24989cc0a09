"""The partitioner against every possible contiguous split, and its rules one by one."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest

from opensmd.modelparallel.planning.partition import manual_partition, partition
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.policies.limits import in_flight
from opensmd.modelparallel.planning.predict import bubble
from opensmd.modelparallel.planning.schedules.tables import in_a_v, looped
from opensmd.modelparallel.planning.trace import Edge, Escape, ModelTrace, ModuleInfo, Unit
from opensmd.modelparallel.planning.units import ON_ONE_HOST, Link, Links


def chain(seconds: list[float], *, parameters: list[int] | None = None, kept: int = 0) -> ModelTrace:
    """A flat sequence of modules "0", "1", ... with these costs."""
    sizes = parameters or [1] * len(seconds)
    modules = {"": ModuleInfo(name="", kind="Sequential", calls=1)}
    for index, size in enumerate(sizes):
        modules[str(index)] = ModuleInfo(
            name=str(index),
            kind="Layer",
            calls=1,
            parameters=size,
            parameter_bytes=4 * size,
            trainable_bytes=4 * size,
        )
    return ModelTrace(
        modules=modules,
        units=tuple(
            Unit(module=str(i), forward_seconds=s / 3, backward_seconds=2 * s / 3, activation_bytes=kept)
            for i, s in enumerate(seconds)
        ),
        edges=tuple(Edge(source=i, target=i + 1, bytes=0, tensor=i) for i in range(len(seconds) - 1)),
        uses={str(index): index for index, size in enumerate(sizes) if size},
    )


def with_shared(trace: ModelTrace, *groups: tuple[str, ...]) -> ModelTrace:
    return ModelTrace(
        modules=trace.modules, units=trace.units, edges=trace.edges, uses=trace.uses, shared=groups
    )


def worst(plan: Plan, trace: ModelTrace, weight: float) -> float:
    """The objective of the worst stage, computed from the plan's predictions."""
    time_total = sum(load.seconds for load in plan.loads)
    memory_total = sum(trace.training_bytes(2.0))
    return max(
        (1 - weight) * load.seconds / time_total + weight * load.training_bytes / memory_total
        for load in plan.loads
    )


def best_contiguous(shares: list[float], stages: int) -> float:
    count = len(shares)
    return min(
        max(sum(shares[a:b]) for a, b in itertools.pairwise((0, *cuts, count)))
        for cuts in itertools.combinations_with_replacement(range(count + 1), stages - 1)
    )


@pytest.mark.parametrize("seed", range(30))
def test_within_five_percent_of_the_best_contiguous_split(seed: int) -> None:
    draw = random.Random(seed)
    count, stages = draw.randint(4, 14), draw.randint(2, 4)
    seconds = [draw.choice([draw.uniform(0.1, 1), draw.expovariate(1) + 0.01]) for _ in range(count)]
    sizes = [100_000 * draw.randint(1, 1000) for _ in range(count)]
    weight = draw.choice([0.0, 0.2, 0.5, 0.8, 1.0])
    trace = chain(seconds, parameters=sizes)
    plan = partition(trace, stages, memory_weight=weight)
    shares = [
        (1 - weight) * s / sum(seconds) + weight * p / sum(sizes) for s, p in zip(seconds, sizes, strict=True)
    ]
    assert worst(plan, trace, weight) <= 1.05 * best_contiguous(shares, stages)
    order = [plan.homes[str(index)] for index in range(count)]
    assert order == sorted(order)


@pytest.mark.parametrize("weight", [0.0, 0.2, 0.8])
@pytest.mark.parametrize("seconds", [0.0, 2e-5])
def test_equal_modules_whose_work_is_unseen_get_equal_shares(seconds: float, weight: float) -> None:
    trace = chain([seconds] * 8, parameters=[64] * 8, kept=512)
    for stages in (2, 4, 8):
        plan = partition(trace, stages, memory_weight=weight, microbatches=16)
        assert [list(plan.homes.values())[1:].count(stage) for stage in range(stages)] == [
            8 // stages
        ] * stages


def test_a_thousand_modules_take_less_than_two_seconds() -> None:
    draw = random.Random(0)
    trace = chain([draw.uniform(0.1, 1) for _ in range(1000)])
    started = time.process_time()
    plan = partition(trace, 8, memory_weight=0.5, microbatches=8)
    assert time.process_time() - started < 2.0
    assert set(plan.homes.values()) == set(range(8))


def test_every_name_has_a_home_also_aliases_and_modules_that_never_ran() -> None:
    trace = chain([1.0, 1.0, 1.0, 1.0])
    modules = {**trace.modules, "3.idle": ModuleInfo(name="3.idle", kind="Idle")}
    trace = ModelTrace(modules=modules, units=trace.units, uses=trace.uses, aliases={"again": "3"})
    plan = partition(trace, 2)
    assert set(plan.homes) == {*modules, "again"}
    assert plan.homes["3.idle"] == plan.homes["3"] == plan.homes["again"] == 1


def test_more_stages_than_modules_leaves_stages_empty() -> None:
    plan = partition(chain([1.0, 1.0]), 4)
    assert len({plan.homes["0"], plan.homes["1"]}) == 2
    assert [load.parameter_bytes for load in plan.loads].count(0) == 2
    (note,) = plan.notes
    assert "nothing of the model lives on partition" in note


def test_shared_parameters_live_on_one_stage() -> None:
    trace = with_shared(chain([1.0] * 8, parameters=[500, 1, 1, 1, 1, 1, 1, 500]), ("0.weight", "7.weight"))
    plan = partition(trace, 2, memory_weight=0.0)
    assert plan.homes["0"] == plan.homes["7"]
    assert plan.shared[0].home == plan.homes["0"]
    assert sorted(load.seconds for load in plan.loads) == pytest.approx([4.0, 4.0])


def test_two_groups_of_shared_parameters_each_find_their_best_end() -> None:
    trace = with_shared(chain([3.0, 1.0, 1.0, 1.0, 1.0, 3.0]), ("0.w", "4.w"), ("1.w", "5.w"))
    plan = partition(trace, 2, memory_weight=0.0)
    assert plan.homes["0"] == plan.homes["4"]
    assert plan.homes["1"] == plan.homes["5"]
    assert sorted(load.seconds for load in plan.loads) == pytest.approx([5.0, 5.0])


def test_parameterless_modules_run_where_the_balance_is_best_but_never_alone() -> None:
    trace = chain([1.0, 1.0, 1.0, 1.0], parameters=[1, 0, 1, 0])
    assert [partition(trace, 2, memory_weight=0.0).homes[name] for name in "0123"] == [0, 0, 1, 1]
    trace = chain([3.0, 2.0, 1.0, 1.0], parameters=[1, 0, 1, 0])
    assert [partition(trace, 2, memory_weight=0.0).homes[name] for name in "0123"] == [0, 1, 1, 1]
    trace = chain([1.0, 4.0, 1.0, 1.0], parameters=[1, 0, 1, 0])
    assert [partition(trace, 3, memory_weight=0.0).homes[name] for name in "0123"] != [0, 1, 2, 2]


def test_fixed_places_are_kept_in_and_against_the_order() -> None:
    trace = chain([1.0] * 6)
    plan = partition(trace, 2, memory_weight=0.0, fixed={"1": 1})
    assert plan.homes["1"] == plan.homes["5"] == 1
    plan = partition(trace, 3, memory_weight=0.0, fixed={"0": 2, "5": 0})
    assert (plan.homes["0"], plan.homes["5"]) == (2, 0)
    assert max(load.seconds for load in plan.loads) <= 4.0


def test_fixed_places_hold_for_what_is_below_unless_it_has_its_own() -> None:
    infos = {
        name: ModuleInfo(name=name, kind="M", calls=1, parameters=1, parameter_bytes=4, trainable_bytes=4)
        for name in ("", "a", "a.x", "a.y", "b")
    }
    trace = ModelTrace(
        modules=infos,
        units=tuple(Unit(module=name, forward_seconds=1.0) for name in ("a.x", "a.y", "b")),
        uses={"": 0, "a": 0, "a.x": 0, "a.y": 1, "b": 2},
    )
    plan = manual_partition(trace, 3, fixed={"a": 1, "a.y": 2}, default=0)
    assert plan.homes == {"": 0, "a": 1, "a.x": 1, "a.y": 2, "b": 0}


def test_manual_places_of_modules_that_share_a_tensor_go_together_with_a_note() -> None:
    trace = with_shared(chain([1.0, 1.0]), ("0.weight", "1.weight"))
    plan = manual_partition(trace, 2, fixed={"0": 0, "1": 1}, default=0)
    assert plan.homes["1"] == 0
    assert "0.weight, 1.weight are one tensor" in plan.notes[0]


def test_manual_places_of_modules_that_share_through_a_third_go_together() -> None:
    shared = ("0.weight", "3.weight"), ("2.bias", "3.bias")
    trace = with_shared(chain([1.0] * 4), *shared)
    plan = manual_partition(trace, 2, fixed={"2": 1, "3": 1}, default=0)
    assert [plan.homes[name] for name in "0123"] == [0, 0, 0, 0]
    assert [plan.parameter_home(name) for names in shared for name in names] == [0] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 0}, "partitions must be at least 1"),
        ({"memory_weight": 1.5}, "memory_weight must be between 0 and 1"),
        ({"fixed": {"nowhere": 0}}, "'nowhere', which is not a module"),
        ({"fixed": {"0": 7}}, "partition 7, but partitions go from 0 to 1"),
    ],
)
def test_wrong_requests_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(chain([1.0, 1.0]), **{"stages": 2, **change})  # type: ignore[arg-type]


def sending(seconds: list[float], sizes: list[int]) -> ModelTrace:
    """A chain in which each module sends so many bytes to the next one."""
    trace = chain(seconds)
    edges = (Edge(source=i, target=i + 1, bytes=size, tensor=i) for i, size in enumerate(sizes))
    return replace(trace, edges=tuple(edges))


def test_the_cheaper_crossing_wins_where_balance_allows_both() -> None:
    # the middle cut is a hair better balanced but would carry a gigabyte
    trace = sending([1.0, 1.0, 0.01, 1.0, 1.0], [10, 10**9, 10, 10])
    plan = partition(trace, 2, memory_weight=0.0)
    assert plan.homes["2"] == plan.homes["1"] == 0
    assert plan.crossings[0].bytes == 10


@pytest.mark.parametrize("narrow", [2, 4])
def test_the_narrow_crossing_is_between_hosts_where_one_of_two_must_be(narrow: int) -> None:
    """Of three stages two share a host, and only before one unit of six there is little to send."""
    sizes = [10 if i + 1 == narrow else 10**8 for i in range(5)]
    apart = frozenset({(0, 1), (0, 2)} if narrow == 2 else {(0, 2), (1, 2)})
    slow = Link(message=1e-4, rate=1e8)
    plan = partition(sending([1.0] * 6, sizes), 3, memory_weight=0.0, links=Links(slow, apart))
    (between,) = (crossing for crossing in plan.crossings if crossing.between_hosts)
    assert (between.target, between.bytes) == (narrow // 2, 10)
    assert between.seconds == pytest.approx(slow.seconds(10))
    (here,) = (crossing for crossing in plan.crossings if not crossing.between_hosts)
    assert here.seconds == pytest.approx(ON_ONE_HOST.seconds(10**8))


def test_a_slow_link_moves_the_cut_to_where_little_crosses_it() -> None:
    trace = sending([1.0] * 8, [10 if i == 2 else 10**8 for i in range(7)])
    slow = Links(Link(message=1e-4, rate=1e8), frozenset({(0, 1)}))
    plans = [partition(trace, 2, memory_weight=0.0, links=links) for links in (None, slow)]
    assert [plan.homes["3"] for plan in plans] == [0, 1]  # four units on each stage, and three and five


def test_activations_of_several_microbatches_weigh_more_on_early_stages() -> None:
    assert in_flight(partitions=4, microbatches=8, active_microbatches=6, chain=True) == [6, 5, 3, 1]
    assert in_flight(partitions=4, microbatches=2, active_microbatches=6, chain=True) == [2, 2, 2, 1]
    trace = chain([1.0] * 12, kept=8 << 20)
    plan = partition(trace, 2, memory_weight=1.0, microbatches=8)
    sizes = [list(plan.homes.values())[1:].count(stage) for stage in (0, 1)]
    assert sizes == [3, 9]


def test_later_stages_leave_weight_gradients_for_later_within_what_may_be_active() -> None:
    trace = chain([1.0] * 4)

    def late(**settings: int) -> list[int]:
        return [load.late for load in partition(trace, 4, **{"microbatches": 8, **settings}).loads]

    assert late() == [0, 6, 6, 6]
    assert late(active_microbatches=2) == [0, 2, 2, 2]
    assert late(late_microbatches=1) == [0, 1, 1, 1]
    assert late(late_microbatches=0) == late(microbatches=1) == [0, 0, 0, 0]


def test_modules_that_hooks_carry_tensors_past_are_opened_where_the_others_need_them() -> None:
    names = ("", "a", "a.in", "a.in.hooked", "b", "b.in", "b.in.hooked", "again", "again.in")
    trace = ModelTrace(
        modules={name: ModuleInfo(name=name, kind="M") for name in names[:7]},
        units=(Unit(module="a.in.hooked"), Unit(module="b.in.hooked")),
        aliases={"again": "b", "again.in": "b.in", "again.in.hooked": "b.in.hooked"},
        hooked=frozenset({"b.in.hooked"}),
    )
    fixed = {"a": 0, "b": 1}

    def opened(*escapes: tuple[set[str], str | None]) -> tuple[str, ...]:
        found = frozenset(Escape(inside=frozenset(inside), around=around) for inside, around in escapes)
        plan = partition(replace(trace, escapes=found), 2, fixed=fixed)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.hooked == ("b.in.hooked",)
        assert {"a.in.hooked", "b.in.hooked"}.isdisjoint(plan.split())
        return tuple(sorted(plan.split() - {""}))

    assert opened() == ()
    assert opened(({"a.in"}, "a")) == ()  # all of it stays where a lives
    assert opened(({"a.in"}, "")) == ("a", "a.in")
    assert opened(({"b.in", "b", ""}, None)) == ("again", "again.in", "b", "b.in")
    assert opened(({"a"}, ""), ({"a.in"}, "a")) == ("a", "a.in")  # a is open, so that counts, too


def test_modules_that_call_one_of_another_stage_are_opened() -> None:
    names = ("", "a", "a.in", "a.in.guest", "b", "b.in", "b.in.leaf")
    trace = ModelTrace(
        modules={name: ModuleInfo(name=name, kind="M") for name in names},
        units=(Unit(module="a.in.guest"), Unit(module="b.in.leaf")),
        guests=frozenset({("b", "a.in.guest"), ("b.in", "a.in.guest")}),
    )

    def opened(fixed: dict[str, int]) -> set[str]:
        return partition(trace, 2, fixed=fixed).split() - {""}

    assert opened({"a": 0, "b": 1}) == {"a", "a.in", "b", "b.in"}
    assert opened({"a": 1, "b": 1}) == set()


def test_a_plan_survives_the_journey_to_other_ranks() -> None:
    plan = partition(with_shared(chain([1.0, 2.0, 3.0]), ("0.w", "1.w")), 2)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="not a partition plan"):
        Plan.from_json("{}")


@pytest.mark.parametrize("memory_weight", [0.0, 0.2, 0.8, 1.0])
def test_equal_modules_of_which_hardly_anything_is_seen_get_equal_shares(memory_weight: float) -> None:
    """As of a custom function whose work no estimate sees, and whose activations are a few bytes."""
    trace = chain([1e-9] * 8, kept=1000)
    plan = partition(trace, 4, memory_weight=memory_weight, microbatches=8)
    assert [list(plan.homes.values())[1:].count(stage) for stage in range(4)] == [2, 2, 2, 2]


def test_in_a_v_the_first_stage_has_the_beginning_and_the_end() -> None:
    trace = chain([1.0] * 8)
    plan = partition(trace, 2, microbatches=8, virtual_stages=in_a_v(2))
    assert list(plan.homes.values())[1:] == [0, 0, 1, 1, 1, 1, 0, 0]
    assert plan.virtual_stages == 2 and Plan.from_json(plan.to_json()) == plan
    assert {(each.source, each.target) for each in plan.crossings} == {(0, 1), (1, 0)}
    assert bubble(plan, 8) < bubble(partition(trace, 2, microbatches=8), 8)
    looped_plan = partition(trace, 2, microbatches=8, virtual_stages=looped(2, 2))
    assert list(looped_plan.homes.values())[1:] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert partition(trace, 2, fixed={"7": 1}, virtual_stages=in_a_v(2)).homes["7"] == 1

"""The order in which units are cut: who joins whom, who leaves it, and what a cut costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opensmd.modelparallel.planning.trace import Edge, ModelTrace, ModuleInfo, Reuse, Unit
from opensmd.modelparallel.planning.units import (
    BETWEEN_GPUS,
    ON_ONE_HOST,
    OPERATION_SECONDS,
    Link,
    Links,
    UnitGroups,
    UnitSequence,
    Weights,
    weights_of,
)

BYTES = 4_000_000


def chain(parameters: list[int], **more: object) -> ModelTrace:
    """Modules "0", "1", ... called one after the other, with so many parameters of four bytes."""
    modules = {"": ModuleInfo(name="", kind="Sequential", calls=1)}
    for index, count in enumerate(parameters):
        modules[str(index)] = ModuleInfo(
            name=str(index), kind="Layer", parameters=count, parameter_bytes=4 * count
        )
    return ModelTrace(
        modules=modules,
        units=tuple(Unit(module=str(index), forward_seconds=1.0) for index in range(len(parameters))),
        edges=tuple(Edge(source=i, target=i + 1, bytes=BYTES, tensor=i) for i in range(len(parameters) - 1)),
        uses={str(index): index for index, count in enumerate(parameters) if count},
        **more,  # type: ignore[arg-type]
    )


def sequence(
    trace: ModelTrace, *leads: int, wanted: dict[int, int] | None = None, keep: bool = True
) -> UnitSequence:
    groups = UnitGroups.of(trace, wanted or {})
    return UnitSequence.of(trace, groups, leads, wanted=wanted or {}, keep_fixed=keep)


def test_units_without_parameters_go_with_the_one_before_them_if_that_moves() -> None:
    trace = chain([1, 0, 0, 1])
    assert UnitGroups.of(trace, {}).joined == {}
    assert sequence(trace).position == {0: 0, 1: 1, 2: 2, 3: 3}
    assert UnitGroups.of(trace, {0: 1}).joined == {1: 0, 2: 0}
    assert UnitGroups.of(trace, {0: 1, 2: 1}).joined == {1: 0}
    shared = chain([1, 0, 1], shared=(("0.weight", "2.weight"),))
    assert sequence(shared, 2).position == {0: 0, 1: 0, 2: 0}


def test_units_that_share_through_a_third_are_one_group_with_both_ends_as_leads() -> None:
    trace = chain([1, 1, 1, 1], shared=(("0.weight", "2.weight"), ("2.bias", "3.bias")))
    groups = UnitGroups.of(trace, {})
    assert groups.members == ((0, 2, 3),) and groups.candidates() == [(3,), (0,)]
    assert sequence(trace, 3).position == {0: 1, 1: 0, 2: 1, 3: 1}
    assert sequence(trace, 0).position == {0: 0, 1: 1, 2: 0, 3: 0}


def test_many_groups_are_led_all_by_their_last_or_all_by_their_first() -> None:
    count = 8
    shared = tuple((f"{2 * i}.weight", f"{2 * i + 1}.weight") for i in range(count))
    found = UnitGroups.of(chain([1] * 2 * count, shared=shared), {}).candidates()
    assert found == [tuple(range(1, 2 * count, 2)), tuple(range(0, 2 * count, 2))]


@pytest.mark.parametrize(
    ("size", "users", "bound", "together"),
    [
        (4000, (0, 1), False, True),
        (4, (0, 1), False, False),  # small: sent where it is needed
        (4, (0, 1), True, True),  # read by a module that runs as a whole
        (4000, (0, 1, 2, 3, 4), False, False),  # nearly everybody would have to be together
    ],
)
def test_large_and_bound_weights_of_few_users_keep_these_together(
    size: int, users: tuple[int, ...], bound: bool, together: bool
) -> None:
    trace = chain([1000] * 5, reuses=(Reuse(bytes=size, units=users, name="0.weight", bound=bound),))
    assert (UnitGroups.of(trace, {}).members != ()) is together
    assert (weights_of(trace, [1]) == ["0.weight"]) is together


def test_a_unit_placed_against_the_order_leaves_the_sequence() -> None:
    trace = chain([1, 1, 1])
    rising = sequence(trace, wanted={0: 0, 2: 1})
    assert rising.fixed == (0, -1, 1) and rising.detached == {}
    falling = sequence(trace, wanted={0: 1, 2: 0})
    assert falling.fixed == (1, -1) and falling.detached == {2: 0}
    assert sequence(trace, wanted={0: 0, 2: 1}, keep=False).detached == {0: 0, 2: 1}


def test_a_cut_costs_each_tensor_that_crosses_it_once_there_and_once_back() -> None:
    once = 2 * ON_ONE_HOST.seconds(BYTES)
    trace = chain([1, 1, 1])
    assert sequence(trace).cut_seconds() == pytest.approx([0, once, once])
    twice = replace(trace, edges=(*trace.edges, Edge(source=0, target=2, bytes=BYTES, tensor=0)))
    assert sequence(twice).cut_seconds() == pytest.approx([0, once, 2 * once])


def test_a_cut_that_opens_a_module_costs_the_operations_in_it() -> None:
    names = ["a", "a.0", "a.1", "b"]
    modules = {"": ModuleInfo(name="", kind="Model")} | {
        name: ModuleInfo(
            name=name, kind="Layer", calls=1, parameters=int(name != "a"), operations=5 * (name == "a")
        )
        for name in names
    }
    trace = ModelTrace(
        modules=modules,
        units=tuple(Unit(module=name) for name in ("a.0", "a.1", "b")),
        uses={"a.0": 0, "a.1": 1, "b": 2},
    )
    inside, between = sequence(trace).cut_seconds()[1:]
    assert between == 0 and inside == pytest.approx((5 + 2) * OPERATION_SECONDS)  # a's own, and two calls


def test_units_out_of_the_sequence_count_for_the_stage_that_has_them() -> None:
    trace = replace(
        chain([1, 1, 1, 1]), units=tuple(Unit(module=str(i), forward_seconds=1.0) for i in range(4))
    )
    made = sequence(trace, wanted={3: 0}, keep=False)
    split = made.cut(Weights(memory=0.0, optimizer_bytes=2.0, in_flight=(1, 1)), [ON_ONE_HOST])
    assert made.stages_of_units(split) == {0: 0, 1: 1, 2: 1, 3: 0}


def test_tensors_cross_between_hosts_at_the_speed_of_the_link_there() -> None:
    slow = Link(message=1e-3, rate=1e6)
    trace = chain([1, 1, 1])
    assert sequence(trace).cut_seconds(slow) == pytest.approx([0, *[2 * (1e-3 + BYTES / 1e6)] * 2])
    links = Links(slow, frozenset({(0, 2), (1, 2)}))
    assert [links.between(*pair) for pair in ((0, 1), (2, 1), (0, 2))] == [ON_ONE_HOST, slow, slow]
    assert not links.cross(1, 0) and links.cross(2, 0)
    between_gpus = replace(links, on_one_host=BETWEEN_GPUS)
    assert [between_gpus.between(0, other) for other in (1, 2)] == [BETWEEN_GPUS, slow]

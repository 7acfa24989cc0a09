"""A plan as data."""

from __future__ import annotations

import pytest

from opensmd.modelparallel.planning.plan import (
    Crossing,
    Plan,
    PlanRow,
    SharedParameter,
    StageLoad,
    ancestors,
    is_inside,
)

HOMES = {"": 0, "body": 1, "body.0": 0, "body.1": 1, "body.1.inner": 1, "head": 1, "kept": 0, "kept.0": 0}


def test_split_modules_are_those_around_several_stages_opened_ones_and_containers() -> None:
    plan = Plan(stages=2, homes=HOMES)
    assert plan.split() == {"", "body"}
    assert plan.atomic() == {"body.0": 0, "body.1": 1, "head": 1, "kept": 0}
    opened = Plan(stages=2, homes=HOMES, opened=("body.1",))
    assert opened.atomic() == {"body.0": 0, "body.1.inner": 1, "head": 1, "kept": 0}
    contained = Plan(stages=2, homes=HOMES, containers=("kept",))
    assert contained.atomic() == {"body.0": 0, "body.1": 1, "head": 1, "kept.0": 0}, (
        "nobody calls a container"
    )
    assert Plan(stages=1, homes={"": 0, "a": 0}).atomic() == {"": 0}


def test_a_parameter_lives_with_its_module() -> None:
    plan = Plan(stages=2, homes=HOMES)
    assert (plan.parameter_home("body.1.inner.weight"), plan.parameter_home("scale")) == (1, 0)


def test_a_plan_comes_back_from_its_text() -> None:
    plan = Plan(
        stages=2,
        homes=HOMES,
        shared=(SharedParameter(names=("a.w", "b.w"), home=1),),
        loads=(StageLoad(forward_seconds=1.0, late=2), StageLoad()),
        crossings=(Crossing(source=0, target=1, tensors=2, bytes=64),),
        rows=(PlanRow(module="head", kind="Linear", stage=1, parameters=3),),
        notes=("a note",),
        opened=("body.1",),
        hooked=("head",),
        containers=("kept",),
        virtual_stages=2,
    )
    assert Plan.from_json(plan.to_json()) == plan
    for text in ("", "[]", "{}", '{"stages": 1}'):
        with pytest.raises(ValueError, match="this text is not a partition plan"):
            Plan.from_json(text)


@pytest.mark.parametrize(
    ("stages", "homes", "reason"),
    [
        (0, {"": 0}, "at least one stage, got 0"),
        (1, {"a": 0}, "a stage for the root module"),
        (2, {"": 0, "a": 2}, r"module 'a' is placed on stage 2, but stages go from 0 to 1"),
    ],
)
def test_impossible_plans_are_refused(stages: int, homes: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Plan(stages=stages, homes=homes)


def test_a_stage_needs_what_its_microbatches_keep_at_once() -> None:
    plain = StageLoad(training_bytes=100, activation_bytes=10, in_flight=3)
    assert plain.memory_bytes == 130
    late = StageLoad(
        training_bytes=100,
        activation_bytes=10,
        in_flight=1,
        late=3,
        late_input_bytes=8,
        late_gradient_bytes=4,
    )
    # two wait with 12 each, one is in its backward with 10, and its own gradients of weights with 4
    assert late.memory_bytes == 100 + 2 * 12 + 10 + 4
    assert late.waiting_bytes == 3 * 12


def test_names_say_what_is_around_them() -> None:
    assert list(ancestors("a.b.c")) == ["a.b", "a", ""] and list(ancestors("")) == []
    assert is_inside("a.b", "a") and is_inside("a", "a") and is_inside("a", "")
    assert not is_inside("ab", "a")

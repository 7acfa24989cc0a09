"""Which unit decides where a module lives, and who owns a parameter."""

from __future__ import annotations

from opensmd.modelparallel.planning.trace import ModelTrace, ModuleInfo, Unit


def trace(names: str, units: str, **more: object) -> ModelTrace:
    modules = {name: ModuleInfo(name=name, kind="Module") for name in ["", *names.split()]}
    made = tuple(Unit(module="" if name == "-" else name) for name in units.split())
    return ModelTrace(modules=modules, units=made, **more)  # type: ignore[arg-type]


def test_a_module_is_anchored_where_its_own_parameters_are_first_used() -> None:
    made = trace("a a.b c", "a.b c", uses={"a": 1})
    assert made.anchors == {"": 0, "a": 1, "a.b": 0, "c": 1}


def test_without_parameters_the_first_unit_inside_counts_and_else_the_parents() -> None:
    made = trace("a a.b a.c d d.never", "- a.c d")
    assert made.anchors == {"": 0, "a": 1, "a.b": 1, "a.c": 1, "d": 2, "d.never": 2}


def test_a_unit_has_the_stage_of_who_uses_parameters_there() -> None:
    made = trace("a a.weighty b", "a b", uses={"a.weighty": 0})
    assert made.deciders == ["a.weighty", "b"]


def test_the_owner_of_a_parameter_goes_by_the_modules_first_name() -> None:
    made = trace("a", "a", aliases={"again": "a"})
    assert made.owner("again.weight") == made.owner("a.weight") == "a" and made.owner("weight") == ""

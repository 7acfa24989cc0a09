"""Modules are opened that cannot run as a whole."""

from __future__ import annotations

from typing import Any

from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.split_modules import with_opened
from opensmd.modelparallel.planning.trace import Escape, ModelTrace

HOMES = {"": 0, "a": 0, "a.in": 0, "b": 1, "b.in": 1}


def opened(homes: dict[str, int] = HOMES, **seen: Any) -> tuple[str, ...]:
    trace = ModelTrace(modules=(), units=(), edges=(), **seen)
    return with_opened(Plan(stages=2, homes=homes), trace).opened


def test_a_module_that_calls_one_of_another_stage_is_opened_with_all_around_both() -> None:
    assert set(opened(guests=(("a.in", "b.in"),))) == {"", "a", "a.in", "b"}
    assert opened(guests=(("a.in", "a"),)) == (), "on one rank nothing is needed"


def test_what_is_carried_past_a_module_that_runs_whole_needs_nothing() -> None:
    assert opened(escapes=(Escape(around="a", inside=("a.in",)),)) == ()
    assert set(opened(escapes=(Escape(around="", inside=("a.in",)),))) == {"", "a", "a.in"}
    assert set(opened(escapes=(Escape(around=None, inside=("b",)),))) == {"", "b"}


def test_an_opened_module_is_so_under_all_its_names() -> None:
    homes = {**HOMES, "c": 0, "c.in": 0}
    found = opened(homes, guests=(("a.in", "b"),), aliases={"c.in": "a.in"})
    assert {"a.in", "c.in", "c"} <= set(found)


def test_what_one_opening_splits_is_looked_at_again() -> None:
    escapes = (Escape(around="a", inside=("a.in",)), Escape(around=None, inside=("a",)))
    assert "a.in" in opened(escapes=escapes), "a is split by the second, which the first is about"

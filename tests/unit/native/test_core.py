"""The stub of the compiled core names exactly what the core has."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import opensmd.native
from opensmd.native import core
from opensmd.native.build import load

STUB = ast.parse((Path(opensmd.native.__file__).parent / "core.pyi").read_text())
INHERITED = {"__doc__", "__module__", "_pybind11_conduit_v1_"}  # what every class of pybind11 has


def definitions(node: ast.Module | ast.ClassDef) -> dict[str, ast.stmt]:
    """What the stub defines there, by name; not what describes values of dictionaries alone."""
    found: dict[str, ast.stmt] = {}
    for one in node.body:
        if isinstance(one, ast.FunctionDef) or (
            isinstance(one, ast.ClassDef) and [*map(ast.unparse, one.bases)] != ["TypedDict"]
        ):
            found[one.name] = one
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            found[one.target.id] = one
    return found


def members(kind: Any, described: ast.ClassDef) -> set[str]:
    """The names of a compiled class; a constructor counts where the stub has one or Python may call it."""
    inherited = INHERITED if "__init__" in definitions(described) else {*INHERITED, "__init__"}
    return set(vars(kind)) - inherited


def test_the_stub_names_what_the_core_has() -> None:
    compiled = {name: value for name, value in vars(load()).items() if not name.startswith("__")}
    described = definitions(STUB)
    assert set(described) == set(compiled)
    for name, node in described.items():
        if isinstance(node, ast.ClassDef):
            assert set(definitions(node)) == members(compiled[name], node), name


def test_the_stub_names_the_arguments_that_the_core_names() -> None:
    named = {}
    for name, node in definitions(STUB).items():
        found = re.match(rf"{name}\(\*, (.*)\) ->", getattr(load(), name).__doc__ or "")
        if found is not None and isinstance(node, ast.FunctionDef):
            named[name] = [kwonlyarg.arg for kwonlyarg in node.args.kwonlyargs]
            assert re.findall(r"(?:^|, )(\w+): ", found[1]) == named[name]
    assert {"make_shared_backend", "make_gloo_backend"} <= set(named)


def test_names_of_the_core_are_those_of_the_module_that_was_compiled() -> None:
    assert core.Mailbox is load().Mailbox
    assert not hasattr(core, "nothing")

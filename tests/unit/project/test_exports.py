"""A module's ``__all__`` is what others rely on: all that they import of it, and nothing that is not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[3] / "src"
FILES = sorted((SOURCES / "opensmd").rglob("*.py"))


def test_what_others_import_of_a_module_is_in_its_list() -> None:
    missing = {
        f"{module}.{name}, which {file.relative_to(SOURCES)} imports"
        for file in FILES
        for module, name in _imported(file)
        if (exported := _exported(module)) is not None and name not in exported and name[0] != "_"
    }
    assert missing == set()


def test_all_that_a_list_names_is_there() -> None:
    absent = {
        f"{module}.{name}"
        for module in map(_module, FILES)
        for name in _exported(module) or ()
        if name not in _defined(module)
    }
    assert absent == set()


def _module(file: Path) -> str:
    names = file.relative_to(SOURCES).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def _imported(file: Path) -> Iterator[tuple[str, str]]:
    """What a file imports from other modules of opensmd: their names, and the names in them."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("opensmd."):
            for name in node.names:
                if _file(f"{node.module}.{name.name}") is None:
                    yield node.module, name.name


@cache
def _exported(module: str) -> frozenset[str] | None:
    """The names in ``__all__`` of a module; None if it has none, or is no file of Python."""
    file = _file(module)
    for node in [] if file is None else _tree(file).body:
        if isinstance(node, ast.Assign) and any(_is_list(target) for target in node.targets):
            return frozenset(ast.literal_eval(node.value))
    return None


def _is_list(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "__all__"


def _defined(module: str) -> set[str]:
    """The names at the top level of a module."""
    file = _file(module)
    assert file is not None
    names: set[str] = set()
    for node in ast.walk(_tree(file)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(name.asname or name.name for name in node.names)
    return names


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _file(module: str) -> Path | None:
    path = SOURCES.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)

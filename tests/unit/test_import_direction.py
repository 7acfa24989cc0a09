"""Packages import only what lies below them, so that each can be read without those above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "src" / "opensmd"

# What each package of opensmd may import besides itself, imports for types alone included.
MAY_IMPORT = {
    "environment": set(),
    "nn": set(),
    "optim": set(),
    "native": {"environment"},
    "collectives": {"environment", "native"},
    "dataparallel": {"collectives", "environment"},
    "legacy": {"collectives", "environment", "native", "doors"},
    "modelparallel": {"collectives", "environment", "native", "optim"},
    "launch": {"collectives", "environment", "legacy", "native"},
    "tools": {"collectives", "environment", "launch", "modelparallel", "native"},
}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package} | _modules_beside_the_packages()
    wrong = [
        f"{file.relative_to(SOURCES)} imports {module}"
        for file in (SOURCES / package).rglob("*.py")
        for module in _imported(file)
        if module.split(".")[1] not in allowed
    ]
    assert not wrong


def test_every_package_has_its_place_in_the_direction_of_imports() -> None:
    assert {path.parent.name for path in SOURCES.glob("*/__init__.py")} == set(MAY_IMPORT)


def _modules_beside_the_packages() -> set[str]:
    """Modules that belong to no package: small, and free to be imported by all but where they import back."""
    return {path.stem for path in SOURCES.glob("*.py")} - {"doors"}


def _imported(file: Path) -> Iterator[str]:
    """Dotted names of what a file imports from opensmd, those inside functions included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("opensmd."))

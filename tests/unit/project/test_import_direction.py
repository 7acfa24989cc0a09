"""Packages import only what lies below them, so that each can be read without those above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "src" / "opensmd"

# What each package of opensmd may import besides itself, imports for types alone included.
MAY_IMPORT = {
    "environment": set(),
    "nn": set(),
    "optim": set(),
    "native": {"environment"},
    "timeline": {"environment"},
    "collectives": {"environment", "native", "timeline"},
    "dataparallel": {"collectives", "environment"},
    "legacy": {"collectives", "environment", "native", "import_aliases"},
    "modelparallel": {"collectives", "environment", "native", "optim", "timeline"},
    "launch": {"collectives", "environment", "legacy", "native", "timeline"},
    "tools": {"collectives", "environment", "launch", "modelparallel", "native", "timeline"},
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


# The folders of the runtime from the lowest; files beside them belong to steps and may import all.
RUNTIME = ("tensors", "messages", "turns", "backward")


@pytest.mark.parametrize("folder", RUNTIME)
def test_a_folder_of_the_runtime_knows_none_that_is_above_it(folder: str) -> None:
    runtime = SOURCES / "modelparallel" / "runtime"
    above = {path.parent.name for path in runtime.glob("*/__init__.py")} - {
        *RUNTIME[: RUNTIME.index(folder) + 1]
    }
    wrong = [
        f"{file.relative_to(runtime)} imports {module}"
        for file in (runtime / folder).glob("*.py")
        for module in _imported(file)
        if module.startswith("opensmd.modelparallel.runtime.") and module.split(".")[3] in above
    ]
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    """Also not for types alone, nor inside functions: whoever reads one file of a circle must read all."""
    assert not _circles({_module(file): _files_imported(file) for file in SOURCES.rglob("*.py")})


def test_the_folders_of_modelparallel_import_each_other_one_way() -> None:
    """A file beside the folders counts as a folder: what a folder imports knows nothing of that folder."""
    imports: dict[str, set[str]] = {}
    for file in (SOURCES / "modelparallel").rglob("*.py"):
        if part := _part(_module(file)):
            imports.setdefault(part, set()).update({*map(_part, _files_imported(file))} - {part, ""})
    assert len(imports) > 20
    assert not _circles(imports)


def test_a_circle_is_found_whatever_leads_into_it() -> None:
    assert _circles({"a": {"b"}, "b": {"c", "d"}, "c": {"d"}, "d": set()}) == []
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}) == [["b", "c"]]


def _circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which can be reached from each."""
    reached = {module: _reached(module, imports) for module in imports}
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in imports
        if module in reached[module]
    }
    return sorted(map(sorted, groups))


def _reached(module: str, imports: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    left = [*imports[module]]
    while left:
        other = left.pop()
        if other not in reached:
            reached.add(other)
            left.extend(imports[other])
    return reached


def _part(module: str) -> str:
    """The folder of modelparallel, or the file beside them, to which a module belongs; empty for others."""
    names = module.split(".")
    return names[2] if len(names) > 2 and names[1] == "modelparallel" else ""


def _module(file: Path) -> str:
    """The dotted name of a file; that of its folder for ``__init__.py``."""
    path = file.relative_to(SOURCES.parent).with_suffix("")
    return ".".join(path.parts[:-1] if path.name == "__init__" else path.parts)


def _files_imported(file: Path) -> set[str]:
    """The modules that are files of opensmd, by the names that a file imports from them."""
    files = set()
    for name in _imported(file):
        found = name if _is_file(name) else name.rpartition(".")[0]
        if _is_file(found) and found != _module(file):
            files.add(found)
    return files


def _is_file(name: str) -> bool:
    path = SOURCES.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _modules_beside_the_packages() -> set[str]:
    """Modules that belong to no package: small, and free to be imported by all but where they import back."""
    return {path.stem for path in SOURCES.glob("*.py")} - {"import_aliases"}


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


def test_nothing_in_the_native_core_includes_its_public_header() -> None:
    core = SOURCES / "native" / "csrc" / "core"
    including = {
        str(file.relative_to(core))
        for file in core.rglob("*.[ch]pp")
        if '#include "core/group.hpp"' in file.read_text()
    }
    assert including == {"group.cpp"}

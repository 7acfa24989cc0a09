"""Each folder says what lives there, what it imports, and where to begin reading; and that is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "src" / "opensmd"
FOLDERS = sorted(path.parent for path in SOURCES.rglob("__init__.py") if path.parent != SOURCES)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SOURCES)))
def test_a_folder_says_where_to_begin_and_what_it_imports(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert "begin with" in text.lower(), "the docstring of __init__.py says which file to read first"
    assert "import" in text.lower(), "the docstring of __init__.py says what the folder imports, or may not"


# of modelparallel: beside each other, so that what one imports of another says how they are layered
PARTS = sorted(path.parent for path in (SOURCES / "modelparallel").glob("*/__init__.py"))


@pytest.mark.parametrize("folder", PARTS, ids=lambda folder: folder.name)
def test_a_folder_of_modelparallel_names_every_other_one_that_it_imports(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    named = {name.partition(".")[0] for name in re.findall(r"``([\w.]+)``", text)}
    beside = {part.name for part in PARTS} - {folder.name}
    imported = {
        match[1]
        for file in folder.rglob("*.py")
        for match in re.finditer(r"^\s*from opensmd\.modelparallel\.(\w+)", file.read_text(), re.MULTILINE)
    }
    assert imported & beside <= named, "the docstring of __init__.py names the folders that are imported"

"""Each folder says what lives there, what it imports, and where to begin reading."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "src" / "opensmd"
FOLDERS = sorted(path.parent for path in SOURCES.rglob("__init__.py") if path.parent != SOURCES)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SOURCES)))
def test_a_folder_says_where_to_begin_and_what_it_imports(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert "begin with" in text.lower(), "the docstring of __init__.py says which file to read first"
    assert "import" in text.lower(), "the docstring of __init__.py says what the folder imports, or may not"

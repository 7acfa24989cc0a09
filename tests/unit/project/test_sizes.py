"""No folder, file or class grows beyond what can be taken in at once."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "src" / "opensmd"
PYTHON_FILES, CXX_FILES = 16, 24  # in one folder
LINES = 450  # of one file
METHODS = 25  # of one class
# names that scripts expect in several places
PUBLIC_TWICE = {"DistributedDataParallel", "group"}


@pytest.mark.parametrize(("endings", "most"), [((".py",), PYTHON_FILES), ((".cpp", ".hpp", ".h"), CXX_FILES)])
def test_no_folder_has_too_many_files(endings: tuple[str, ...], most: int) -> None:
    folders = [SOURCES, *(path for path in SOURCES.rglob("*") if path.is_dir())]
    counts = {
        str(folder.relative_to(SOURCES)): sum(path.suffix in endings for path in folder.iterdir())
        for folder in folders
    }
    assert sum(counts.values()) > most
    assert {folder: count for folder, count in counts.items() if count > most} == {}


def test_no_file_is_too_long() -> None:
    files = [path for path in SOURCES.rglob("*") if path.suffix in (".py", ".pyi", ".cpp", ".hpp", ".h")]
    assert files
    lengths = {str(path.relative_to(SOURCES)): len(path.read_text().splitlines()) for path in files}
    assert {file: length for file, length in lengths.items() if length > LINES} == {}


def test_no_class_has_too_many_methods() -> None:
    assert {name: count for name, count in _methods() if count > METHODS} == {}


def test_no_name_of_a_class_means_two_things() -> None:
    """Whoever searches for a class, or reads its name in a traceback, finds one."""
    names = Counter(name.partition(": ")[2] for name, _ in _methods())
    assert {name for name, count in names.items() if count > 1} == PUBLIC_TWICE


def test_hard_code_says_why_it_is_so() -> None:
    """Of the runtime's lines at least three of a hundred have a comment, those for tools not counted."""
    files = [*(SOURCES / "modelparallel" / "runtime").rglob("*.py")]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert lines > 5000
    assert sum(map(_commented_lines, files)) >= 0.03 * lines


def _methods() -> Iterator[tuple[str, int]]:
    """Every class by file and name, with the number of its methods; properties count as methods."""
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
                yield f"{file.relative_to(SOURCES)}: {node.name}", len(methods)


def _commented_lines(file: Path) -> int:
    """Lines with a comment for people."""
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return sum(not text.startswith(("# type:", "# noqa", "# fmt:")) for text in comments)

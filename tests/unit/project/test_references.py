"""What the documentation names is there: files, modules and functions of ours, and programs to run."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILE = re.compile(r"`([\w./-]+\.(?:py|pyi|cpp|hpp|md|toml|yml|txt))`")
NAME = re.compile(r"`(opensmd(?:\.\w+)+)")
SMP = re.compile(r"`smp\.([a-z]\w*(?:\.[a-zA-Z]\w*)*)(?![\w*])")
MODULE = re.compile(r"python -m ((?:benchmarks|opensmd|examples|tests)[\w.]*)")
# Files of users and of torch that pages speak of.
OF_OTHERS = {"train.py", "pipeline.py", "c10d/Backend.hpp"}


def _named(pattern: re.Pattern[str], page: Path) -> Iterator[str]:
    yield from dict.fromkeys(pattern.findall(page.read_text(encoding="utf-8")))


def _files() -> list[str]:
    folders = ("src", "tests", "docs", "examples", "benchmarks", "release")
    beside = [path for path in ROOT.iterdir() if path.is_file()]
    below = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    return [f"/{path.relative_to(ROOT)}" for path in (*beside, *below)]


def test_files_that_pages_name_are_there() -> None:
    present = _files()
    named = {(page.name, name) for page in PAGES for name in _named(FILE, page)}
    assert len(named) > 40
    missing = {
        (page, name)
        for page, name in named
        if name not in OF_OTHERS and not any(file.endswith(f"/{name}") for file in present)
    }
    assert missing == set()


def _is_there(name: str) -> bool:
    """Whether ``name`` is a module, or something in one."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            found: object = importlib.import_module(".".join(words[:count]))
        except ImportError:
            continue
        for word in words[count:]:
            if not hasattr(found, word):
                return False
            found = getattr(found, word)
        return True
    return False


def test_names_of_the_package_that_pages_give_are_there() -> None:
    named = {(page.name, name) for page in PAGES for name in _named(NAME, page)}
    assert len(named) >= 5
    assert {(page, name) for page, name in named if not _is_there(name)} == set()


def test_names_of_smp_that_pages_give_are_there() -> None:
    named = {(page.name, name) for page in PAGES for name in _named(SMP, page)}
    assert len(named) > 60
    missing = {
        (page, name) for page, name in named if not _is_there(f"smdistributed.modelparallel.torch.{name}")
    }
    assert missing == set()


MODULE_OF_OURS = re.compile(r":mod:`(\.*[\w.]+)`")


def test_modules_that_docstrings_refer_to_are_there() -> None:
    files = list((ROOT / "src" / "opensmd").rglob("*.py"))
    named = [(file, name) for file in files for name in _named(MODULE_OF_OURS, file)]
    assert len(named) >= 5
    missing = []
    for file, name in named:
        dots = len(name) - len(name.lstrip("."))
        folder = file.parents[max(0, dots - 1)] if dots else ROOT / "src"
        path = folder.joinpath(*name.lstrip(".").split("."))
        if not path.with_suffix(".py").is_file() and not (path / "__init__.py").is_file():
            missing.append(f"{file.name}: {name}")
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_that_a_page_runs_are_there(page: Path) -> None:
    missing = [
        name
        for name in _named(MODULE, page)
        if not (ROOT / "src" / name.replace(".", "/")).with_suffix(".py").is_file()
        and not (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()
        and not (ROOT / name.replace(".", "/") / "__main__.py").is_file()
    ]
    assert missing == []

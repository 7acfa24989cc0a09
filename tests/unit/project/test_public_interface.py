"""The names of ``opensmd`` itself: all there, explained, and all that the docs and examples need."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import opensmd
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
# what is documented as an interface of its own
PACKAGES = {"legacy", "nn", "optim"}
REACHED = re.compile(r"^\s*(?:from|import) (opensmd\.\w+)[.\w]*|\bsmp\.state\.engine\b", re.MULTILINE)


@pytest.mark.parametrize("name", opensmd.__all__)
def test_every_name_is_there_and_explained(name: str) -> None:
    found = getattr(opensmd, name)
    assert inspect.getdoc(found)
    assert found.__name__ == name


def test_what_is_not_there_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="module 'opensmd' has no attribute 'nothing'"):
        _ = opensmd.nothing
    assert set(opensmd.__all__) <= set(dir(opensmd))


def test_the_interface_costs_nothing_before_it_is_used() -> None:
    loaded = "[name for name in sys.modules if name.partition('.')[0] in ('opensmd', 'torch')]"
    command = [sys.executable, "-c", f"import opensmd, sys; print({loaded})"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "['opensmd']\n"


def test_docs_and_examples_use_the_interface_and_nothing_behind_it() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    reaching = {
        f"{file.relative_to(ROOT)}: {match[0].strip()}"
        for file in files
        for match in REACHED.finditer(file.read_text())
        if match[1] is None or match[1].removeprefix("opensmd.") not in PACKAGES
    }
    assert reaching == set()

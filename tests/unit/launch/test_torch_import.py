"""The collector rests while torch is imported, and nothing else is different afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

TORCH = """
import gc
collections = sum(each["collections"] for each in gc.get_stats())
made = [[] for _ in range(100_000)]
collections = sum(each["collections"] for each in gc.get_stats()) - collections
resting = not gc.isenabled()
"""


@pytest.fixture
def torch_that_makes_many_objects(tmp_path: Path) -> Path:
    """A folder with a small package of torch's name."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "torch" / "part.py").write_text("import gc\nresting = not gc.isenabled()\n")
    return tmp_path


def run(folder: Path, script: str) -> None:
    start = "import gc, sys\nfrom opensmd.launch.torch_import import without_collector\n"
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{start}{script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def test_the_collector_rests_while_torch_is_imported_and_leaves_alone_what_torch_made(
    torch_that_makes_many_objects: Path,
) -> None:
    script = """
finders = list(sys.meta_path)
without_collector()
import json
assert len(sys.meta_path) == len(finders) + 1 and gc.get_freeze_count() == 0  # it waits for torch
import torch
assert torch.resting and torch.collections == 0
assert gc.isenabled() and gc.get_freeze_count() > 100_000
assert sys.meta_path == finders
import torch.part
assert not torch.part.resting
from importlib.machinery import SourceFileLoader
assert type(torch.__loader__) is type(torch.__spec__.loader) is SourceFileLoader
without_collector()
assert sys.meta_path == finders
"""
    run(torch_that_makes_many_objects, script)


def test_a_collector_that_the_script_switched_off_is_not_touched(
    torch_that_makes_many_objects: Path,
) -> None:
    script = """
without_collector()
gc.disable()
import torch
assert not gc.isenabled() and gc.get_freeze_count() == 0
del sys.modules["torch"]
without_collector()
import torch
assert not gc.isenabled() and gc.get_freeze_count() == 0
"""
    run(torch_that_makes_many_objects, script)


def test_an_import_that_fails_is_told_as_ever_and_the_collector_works_on(tmp_path: Path) -> None:
    script = """
without_collector()
try:
    import torch
except ZeroDivisionError:
    assert gc.isenabled() and gc.get_freeze_count() == 0
else:
    raise AssertionError("no error")
"""
    (tmp_path / "torch.py").write_text("1 / 0\n")
    run(tmp_path, script)

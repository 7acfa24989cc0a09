"""The old import paths in fresh interpreters, and a torch that has modules of these names itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

FIRST_LINES = {
    "import torch.distributed.deprecated as dist": "dist.init_process_group.__module__",
    "import opensmd.legacy as dist": "dist.init_process_group.__module__",
}
# Python imports torch first for each of these, so that they can share that, in forks.
AFTER_TORCH = {
    "from torch.distributed.deprecated import all_reduce": "all_reduce.__module__",
    "import torch.nn.parallel.deprecated as nnp": "nnp.DistributedDataParallel.__module__",
    "from torch.nn.parallel.deprecated import DistributedDataParallelCPU as D": "D.__module__",
    "import torch": "torch.nn.parallel.deprecated.DistributedDataParallelCPU.__module__",
    "import torch.distributed": "torch.distributed.deprecated.reduce_op.__module__",
    "import torch.distributed.deprecated.launch as launch": "launch.main.__module__",
}
WHAT_IS_LOADED = """
import torch, sys
print("loaded", *sorted(name for name in sys.modules if name.startswith("opensmd")))
"""
ONE_PACKAGE = """
import torch.distributed.deprecated.launch
import torch.distributed.deprecated.rendezvous.tcp as old
import torch.nn.parallel.deprecated
import opensmd.legacy.parallel, opensmd.legacy.launch
import opensmd.legacy.rendezvous.tcp as new
assert torch.distributed.deprecated is opensmd.legacy
assert torch.distributed.deprecated.launch is opensmd.legacy.launch
assert torch.nn.parallel.deprecated is opensmd.legacy.parallel
assert old is new
assert opensmd.legacy.__spec__.name == opensmd.legacy.__name__ == "opensmd.legacy"
import importlib, importlib.util
assert importlib.util.find_spec("torch.distributed.deprecated.nothing") is None
try:
    torch.distributed.nothing
except AttributeError as error:
    assert "nothing" in str(error)
print("one package")
"""
FORKS = """
import gc, os, sys
gc.disable()
import torch
gc.freeze()
for script in sys.argv[1:]:
    if os.fork() == 0:
        exec(script, {})
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize(("line", "shown"), FIRST_LINES.items())
def test_an_old_import_works_as_the_first_line_of_a_script(line: str, shown: str) -> None:
    done = python("-W", "error", "-c", f"{line}\nprint({shown})")
    assert done.stdout.startswith("opensmd.legacy"), done.stderr


@pytest.fixture(scope="module")
def said_after_torch() -> list[str]:
    """What scripts print, each a line, that need no interpreter of their own but only a fresh torch."""
    scripts = [f"{line}\nprint({shown})" for line, shown in AFTER_TORCH.items()]
    done = python("-W", "error", "-c", FORKS, *scripts, WHAT_IS_LOADED, ONE_PACKAGE)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_old_import_works_after_torch(said_after_torch: list[str]) -> None:
    said = said_after_torch[: len(AFTER_TORCH)]
    assert all(line.startswith("opensmd.legacy") for line in said), said


def test_the_old_name_and_the_new_one_are_one_package(said_after_torch: list[str]) -> None:
    assert said_after_torch[-1] == "one package"


def test_import_torch_alone_loads_nothing_of_the_package_but_the_aliases_and_the_name(
    said_after_torch: list[str],
) -> None:
    name = ["opensmd.collectives", "opensmd.collectives.lookup", "opensmd.collectives.name"]
    loaded = ["opensmd", *name, "opensmd.import_aliases"]
    assert said_after_torch[-2].split() == ["loaded", *loaded]


def test_where_torch_does_not_load_extensions_importing_opensmd_legacy_installs_the_aliases() -> None:
    script = (
        "import opensmd.legacy, torch.distributed.deprecated, torch.nn.parallel.deprecated\n"
        "print(torch.distributed.deprecated is opensmd.legacy)"
    )
    done = python("-c", script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout == "True\n", done.stderr


@pytest.fixture
def torch_of_its_own(tmp_path: Path) -> Path:
    """A folder with a torch that still has the modules, and calls backends as today's does."""
    files = {
        "torch/__init__.py": "import torch.distributed, torch.nn.parallel\n"
        "from importlib.metadata import entry_points\n"
        "for each in entry_points(group='torch.backends'):\n    each.load()()\n",
        "torch/distributed/__init__.py": "",
        "torch/distributed/deprecated/__init__.py": "origin = 'torch'",
        "torch/distributed/deprecated/launch.py": "origin = 'torch'",
        "torch/nn/__init__.py": "",
        "torch/nn/parallel/__init__.py": "deprecated = 'still here'",
        "torch/nn/parallel/deprecated/__init__.py": "origin = 'torch'",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_torch_that_has_these_modules_keeps_them(torch_of_its_own: Path) -> None:
    script = """
import torch
assert torch.nn.parallel.deprecated == "still here"
import torch.distributed.deprecated.launch
import torch.nn.parallel.deprecated
print(torch.distributed.deprecated.origin, torch.distributed.deprecated.launch.origin,
      torch.nn.parallel.deprecated.origin)
"""
    done = python("-c", script, PYTHONPATH=str(torch_of_its_own))
    assert done.stdout == "torch torch torch\n", done.stderr

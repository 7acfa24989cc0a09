"""What is handed to users: a complete source distribution, and a wheel that runs in an empty environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from release.wheel import make_sdist, make_wheel

from tests.scripts.test_docs import examples
from tests.support.patience import PATIENCE
from tests.support.ranks import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(sdist, tmp_path_factory.mktemp("wheel"))


def without_this_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")}


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of commands of an environment that holds the wheel, and borrows what the wheel depends on."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qI", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, env=without_this_checkout())
    # one folder on the path, whose own .pth files, those of a development install too, are not read
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_source_distribution_holds_all_that_users_and_packagers_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of its files")
    ours = {".ci/run", ".gitignore"}
    missing = {
        name
        for name in tracked.stdout.splitlines()
        if name not in names | ours and not name.startswith(".") and (ROOT / name).exists()
    }
    assert missing == set()


def test_the_wheel_is_named_after_the_torch_and_the_python_that_its_core_is_for(wheel: Path) -> None:
    build = torch.__version__.replace("+", "")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-1torch{build}-{python}-{python}-linux_" in wheel.name
    cores = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert len(cores) == 1 and f"prebuilt/torch-{torch.__version__}-" in cores[0]


def run(environment: Path, folder: Path, *words: str) -> str:
    """Run a command where there is no compiler and nothing of this checkout."""
    env = without_this_checkout() | {
        "PATH": str(environment),
        "OPENSMD_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        words, env=env, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Gloo" not in done.stderr, done.stderr
    return done.stdout


IN_TURN = """
import runpy
for name in {names}:
    runpy.run_path(name)
import opensmd.native.build as build
print(build.build())
"""


def test_the_readmes_examples_run_from_the_wheel_without_a_compiler(
    environment: Path, tmp_path: Path
) -> None:
    """In one job: starting it takes longer than what they do."""
    sources = [one.source for one in examples() if one.place.startswith("README.md")]
    names = [str(tmp_path / f"example{number}.py") for number in range(len(sources))]
    for name, source in zip(names, sources, strict=True):
        Path(name).write_text(source)
    script = tmp_path / "train.py"
    script.write_text(IN_TURN.format(names=names))
    out = run(environment, tmp_path, str(environment / "smdrun"), "-n", "2", str(script))
    assert out.count("loss") == 2 * len(sources)
    cores = {line.split()[-1] for line in out.splitlines() if line.endswith(".so")}
    assert len(cores) == 1 and str(environment.parent) in cores.pop()
    assert not (tmp_path / "cache").exists(), "a core was compiled, or looked for in the cache"


def test_the_metadata_claims_only_what_is_tested() -> None:
    """The oldest and the newest Python run the whole suite at every change; none is beyond them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [re.search(r":: Python :: 3\.(\d+)$", text) for text in project["classifiers"]]
    minors = [int(found[1]) for found in named if found]
    first, last = minors[0], minors[-1]
    assert minors == list(range(first, last + 1)) and sys.version_info[1] in minors
    assert project["requires-python"] == f">=3.{first},<3.{last + 1}"
    assert f"PYTHON ?= python3.{first}\n" in (ROOT / "Makefile").read_text()
    assert f'python: ["3.{first}", "3.{last}"]' in (ROOT / ".github" / "workflows" / "ci.yml").read_text()

"""The range of torch versions: written once, the same in the metadata, and any other version warns once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opensmd import tested_torch
from tests.support.patience import PATIENCE

ROOT = Path(__file__).parents[2]
FACES = (
    "import smdistributed.dataparallel.torch.torch_smddp, smdistributed.modelparallel.torch\n"
    "import torch.distributed.deprecated\n"
)


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.12.1", False),
        ("2.13.0+cpu", True),
        ("2.14.1", True),
        ("2.15.0+cu132", True),
        ("2.16.0a0+git12", False),
        ("2.130.0", False),
        ("3.13.0", False),
        ("unknown", False),
    ],
)
def test_a_version_is_tested_by_its_minor_version(version: str, tested: bool) -> None:
    assert tested_torch.is_tested(version) is tested


@pytest.mark.newest
def test_the_torch_that_these_tests_run_on_is_a_tested_one() -> None:
    assert tested_torch.is_tested(torch.__version__)


def test_the_packages_metadata_bounds_torch_to_the_tested_versions() -> None:
    required = re.findall(r'^  "(torch\b.*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert required == [tested_torch.REQUIREMENT]


@pytest.mark.parametrize(
    ("file", "version"),
    [("constraints.txt", tested_torch.OLDEST), ("requirements-newest.txt", tested_torch.NEWEST)],
)
def test_the_suite_runs_on_the_oldest_and_the_short_list_on_the_newest(
    file: str, version: tuple[int, int]
) -> None:
    pinned = re.findall(r"^torch==(\d+)\.(\d+)\.", (ROOT / file).read_text(), re.MULTILINE)
    assert [tuple(map(int, one)) for one in pinned] == [version]


def imports_beside(metadata: Path, rank: int, version: str) -> str:
    """What importing every face of the package says where torch's metadata has this version."""
    folder = metadata / f"torch-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    group = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    paths = os.pathsep.join([str(metadata), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", FACES],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
        env={**os.environ, **group, "PYTHONPATH": paths},
    )
    return done.stderr


@pytest.mark.processes
def test_another_torch_warns_once_on_rank_0_with_what_to_install(tmp_path: Path) -> None:
    said = imports_beside(tmp_path, 0, "2.99.0")
    assert said.count("RuntimeWarning: opensmd is tested with torch") == 1
    assert "this is torch 2.99.0" in said
    assert f"pip install '{tested_torch.REQUIREMENT}'" in said


@pytest.mark.parametrize(("rank", "version"), [(1, "2.99.0"), (0, "2.15.0+cu132")])
@pytest.mark.processes
def test_other_ranks_and_a_tested_torch_say_nothing(tmp_path: Path, rank: int, version: str) -> None:
    assert "opensmd is tested with" not in imports_beside(tmp_path, rank, version)

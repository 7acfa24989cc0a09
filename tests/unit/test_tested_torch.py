"""The range of torch versions: written once, the same in the metadata, and any other version warns once."""

from __future__ import annotations

import json
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


# Ranks and the versions of torch that its metadata tells them.
TOLD = [(0, "2.99.0"), (1, "2.99.0"), (0, "2.15.0+cu132")]
IN_FORKS = """
import gc, json, os, sys
gc.disable()
import torch, torch._dynamo
gc.freeze()
for folder, variables, errors in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        sys.path.insert(0, folder)
        os.environ.update(variables)
        exec(sys.argv[2])
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def said_to(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], str]:
    """What importing every face of the package says to each of these ranks, forks of one that has torch."""
    cases = []
    for rank, version in TOLD:
        folder = tmp_path_factory.mktemp("metadata")
        metadata = folder / f"torch-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        group = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        cases.append((str(folder), group, str(folder / "errors")))
    command = [sys.executable, "-c", IN_FORKS, json.dumps(cases), FACES]
    subprocess.run(command, check=True, timeout=PATIENCE)
    return {told: Path(errors).read_text() for told, (_, _, errors) in zip(TOLD, cases, strict=True)}


@pytest.mark.processes
def test_another_torch_warns_once_on_rank_0_with_what_to_install(said_to: dict[tuple[int, str], str]) -> None:
    said = said_to[0, "2.99.0"]
    assert said.count("RuntimeWarning: opensmd is tested with torch") == 1
    assert "this is torch 2.99.0" in said
    assert f"pip install '{tested_torch.REQUIREMENT}'" in said


@pytest.mark.parametrize("told", TOLD[1:])
@pytest.mark.processes
def test_other_ranks_and_a_tested_torch_say_nothing(
    said_to: dict[tuple[int, str], str], told: tuple[int, str]
) -> None:
    assert "opensmd is tested with" not in said_to[told]

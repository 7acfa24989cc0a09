"""TorchX starts ranks through the component of the examples, on this machine as its scheduler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.conftest import PATIENCE
from tests.support.launchers import SCRIPTS, assert_trained
from tests.support.ranks import ROOT

COMPONENT = ROOT / "examples" / "launchers" / "torchx_component.py"
TORCHX = Path(sys.executable).with_name("torchx")


def torchx(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """TorchX with the component, called in a folder with the scripts."""
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
    shutil.copy(COMPONENT, folder)
    return subprocess.run(
        [str(TORCHX), "run", *arguments],
        cwd=folder,
        env={**os.environ, "PATH": f"{TORCHX.parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_torchx_trains_both_scripts_on_two_ranks_through_the_component(tmp_path: Path) -> None:
    job = [f"{COMPONENT.name}:smdrun", "--script", "both.py", "--j", "1x2"]
    done = torchx(tmp_path, "-s", "local_cwd", *job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_trained(done.stdout + done.stderr, [2])


def test_the_component_gives_each_of_several_hosts_its_number_and_the_address_of_host_0(
    tmp_path: Path,
) -> None:
    job = [f"{COMPONENT.name}:smdrun", "--script", "train.py", "--j", "2x8", "--", "--lr", "0.1"]
    done = torchx(tmp_path, "-s", "local_cwd", "--dryrun", *job)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = "".join(line.strip().strip("'") for line in (done.stdout + done.stderr).splitlines())
    for host in range(2):
        assert f"smdrun -n 8 --nnodes 2 --node-rank {host} --master-port 29500 --master-addr " in shown
    assert '"${TORCHX_RANK0_HOST:=localhost}" train.py --lr 0.1' in shown

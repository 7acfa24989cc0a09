"""The mpi backend under a real ``mpiexec``, and its errors without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.scripts.legacy import openmpi
from tests.support.forks import ForkedProcess, as_main
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
MPICH = Path(sys.executable).parent / "mpiexec"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
WORLD_SIZE = 3


def run_table(mpiexec: Path, environment: dict[str, str]) -> None:
    command = [mpiexec, "-n", WORLD_SIZE, sys.executable, "-m", "tests.scripts.legacy.under_mpi", WORLD_SIZE]
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"rank {rank} of {WORLD_SIZE} got through" for rank in range(WORLD_SIZE)]


def test_every_function_works_under_mpiexec_of_mpich() -> None:
    run_table(MPICH, {})


@pytest.mark.skipif(
    not openmpi.LIBRARY.exists(), reason="Open MPI is not installed: python -m tests.scripts.legacy.openmpi"
)
def test_every_function_works_under_mpiexec_of_open_mpi() -> None:
    run_table(openmpi.MPIEXEC, openmpi.environment())


def test_a_rank_that_fails_ends_the_whole_job_with_its_traceback() -> None:
    script = (
        "import gc\ngc.disable()\nimport torch\ngc.freeze()\n"
        "import torch.distributed.deprecated as dist\ndist.init_process_group('mpi')\n"
        "if dist.get_rank() == 1: raise KeyError('only here')\ndist.recv(torch.zeros(1), 1)\n"
    )
    done = subprocess.run(
        [str(MPICH), "-n", "2", sys.executable, "-c", script],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode != 0
    assert "KeyError: 'only here'" in done.stderr


def said_without_mpiexec(script: str, folder: Path) -> tuple[str, str]:
    """What a script writes, as a fork, to its output and of its errors."""
    (folder / "script.py").write_text(script)
    main = (as_main, str(folder / "script.py"), [])
    process = ForkedProcess(*main, cwd=folder, env=ENVIRONMENT, stdout=PIPE, stderr=PIPE)
    return process.communicate(PATIENCE)


def test_without_mpiexec_a_script_is_a_job_of_one_and_hears_that_its_world_size_is_ignored(
    tmp_path: Path,
) -> None:
    script = (
        "import torch.distributed.deprecated as dist\n"
        "dist.init_process_group('mpi', world_size=4)\n"
        "print(dist.get_rank(), dist.get_world_size())\n"
    )
    out, errors = said_without_mpiexec(script, tmp_path)
    assert out == "0 1\n", errors
    assert "world_size=4 is ignored" in errors
    assert "mpiexec -n 4" in errors


def test_without_mpi4py_the_error_names_what_to_install_and_what_else_there_is(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import torch.distributed.deprecated as dist\n"
        "dist.init_process_group('mpi')\n"
    )
    _, errors = said_without_mpiexec(script, tmp_path)
    assert "Traceback" in errors
    assert "pip install 'opensmd[mpi]'" in errors
    assert "tcp or gloo" in errors

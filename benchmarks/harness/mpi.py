"""The MPI libraries that benchmarks compare with, both from PyPI: MPICH of the environment, and Intel MPI.

The two cannot live in one environment, so ``python -m benchmarks.harness.mpi`` installs Intel MPI into
``out/impi``. mpi4py serves both, because they share one binary interface.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.meeting import Stamps
from benchmarks.harness.native import build

__all__ = ["Mpi", "available", "install_intel", "load", "raw_loop"]

ROOT = Path(__file__).resolve().parents[2]
INTEL = ROOT / "out" / "impi"
INTEL_PACKAGE = "impi-rt==2021.19.0"


@dataclass(frozen=True)
class Mpi:
    """One MPI: how its processes are started and where its library lies."""

    name: str
    mpiexec: Path
    library: Path
    env: dict[str, str]


def available(*, ranks: int, cores: int) -> list[Mpi]:
    """The MPIs installed here, set up for so many ranks on so many cores."""
    prefix = Path(sys.prefix)
    mpich = Mpi("MPICH", prefix / "bin" / "mpiexec", prefix / "lib" / "libmpi.so.12", {})
    env = {"I_MPI_ROOT": str(INTEL), "I_MPI_FABRICS": "shm", "I_MPI_PIN": "off"}
    env["LD_LIBRARY_PATH"] = f"{INTEL / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    if ranks > cores:
        env["I_MPI_THREAD_YIELD"] = "2"  # Intel's advice for more ranks than cores; without it, 1,000x slower
    intel = Mpi("Intel MPI", INTEL / "bin" / "mpiexec", INTEL / "lib" / "libmpi.so.12", env)
    return [mpi for mpi in (mpich, intel) if mpi.library.exists()]


def install_intel() -> None:
    """Install Intel MPI from PyPI into ``out/impi``. Its network part is not needed inside one host."""
    if (INTEL / "lib" / "libmpi.so.12").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", INTEL], check=True)
    pip = [INTEL / "bin" / "pip", "install", "-q", "--no-deps", INTEL_PACKAGE]
    subprocess.run(pip, check=True)


def load(library: Path) -> Any:
    """Load this MPI library for the process and initialise it; return mpi4py's ``MPI``."""
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from mpi4py import MPI

    return MPI


def raw_loop(
    operation: str, source: torch.Tensor, target: torch.Tensor, count: int
) -> Callable[[Stamps], None]:
    """A block that runs the operation in a C loop over MPI. ``operation`` is a letter of mpi_loop.c."""
    include = Path(sys.prefix) / "include"
    loop = ctypes.CDLL(str(build(Path(__file__).with_name("mpi_loop.c"), f"-I{include}"))).mpi_loop

    def block(stamps: Stamps) -> None:
        loop(
            operation.encode(),
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_void_p(target.data_ptr()),
            count,
            ctypes.c_void_p(stamps.ctypes.data),
            len(stamps) - 1,
        )

    return block


if __name__ == "__main__":
    install_intel()
    print("installed:", ", ".join(mpi.name for mpi in available(ranks=2, cores=2)))

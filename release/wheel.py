"""Builds the source distribution and a wheel with the core inside, for the torch that runs this.

The core is compiled for the machine's kind in general (x86-64, say): its kernels choose their instruction set
at run time. It fits one build of torch, after which the wheel is named; elsewhere it is left alone, and the
core is compiled at first use as if it were not there::

    python release/wheel.py --out dist
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from opensmd.native.build import compile_core
from opensmd.native.prebuilt import put_prebuilt

ROOT = Path(__file__).resolve().parents[1]
SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


def make_sdist(out: Path) -> Path:
    """The source distribution of this checkout, in the folder ``out``."""
    command = [sys.executable, "-c", SDIST, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return out / done.stdout.splitlines()[-1]


def make_wheel(sdist: Path, out: Path) -> Path:
    """A wheel with the core inside, from a source distribution, in the folder ``out``."""
    library = compile_core()
    with tempfile.TemporaryDirectory() as core:
        put_prebuilt(library, Path(core))
        env = {**os.environ, "OPENSMD_WHEEL_CORE": core, "OPENSMD_WHEEL_TORCH": torch.__version__}
        # torch is what it is built for, so the environment is this one
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
        before = set(out.glob("*.whl"))
        subprocess.run([*pip, "-w", str(out), str(sdist)], check=True, env=env)
    made = set(out.glob("*.whl")) - before or set(out.glob(f"*1torch{torch.__version__.replace('+', '')}*"))
    return made.pop()


def main() -> None:
    """Build both, and print where they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    sdist = make_sdist(out)
    print(sdist, make_wheel(sdist, out), sep="\n")


if __name__ == "__main__":
    main()

"""Builds and runs the unit tests of the native core, once optimised and once under the thread sanitizer.

The core knows neither Python nor torch, so its tests are C++ programs: ranks are threads of one process,
so that the sanitizer sees every access, or processes where they must die. Objects are kept between runs and
rebuilt when a source or a header is newer.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Compiling takes half a minute on two free cores, several on busy ones.
pytestmark = pytest.mark.timeout(450)

FLAGS = {
    "plain": "-O2",
    "tsan": "-O1 -fsanitize=thread",
}
PROGRAMS = {
    "plain": ["test_kernels", "test_collectives", "test_mailbox", "test_faults"],
    "tsan": ["test_collectives", "test_mailbox"],
}


def build(flavour: str) -> Path:
    """Compile the core and the flavour's programs, two at a time, and return the folder they are in."""
    folder = ROOT / "build" / "native" / flavour
    folder.mkdir(parents=True, exist_ok=True)
    command = ["make", "-s", "-j2", "-C", str(folder), "-f", str(HERE / "Makefile")]
    command += [f"FLAGS={FLAGS[flavour]}", *PROGRAMS[flavour]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def run(program: Path) -> None:
    """Run one test program; its own messages say which check failed."""
    done = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{program.name} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "ok  " in done.stdout, "the program ran no test"


@pytest.mark.parametrize("program", PROGRAMS["plain"])
def test_native_core_passes_its_own_tests(program: str) -> None:
    run(build("plain") / program)


@pytest.mark.parametrize("program", PROGRAMS["tsan"])
def test_native_core_has_no_data_race(program: str) -> None:
    run(build("tsan") / program)

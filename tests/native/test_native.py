"""Builds and runs the unit tests of the native core, once optimised and once under the thread sanitizer.

The core knows neither Python nor torch, so its tests are C++ programs: ranks are threads of one process,
so that the sanitizer sees every access, or processes where they must die. The optimised programs are linked
with the very objects of the product; both flavours are compiled by its recipe.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from opensmd.environment.private_files import private_folder
from opensmd.environment.settings import Settings
from opensmd.native import recipe
from opensmd.native.objects import compile_units
from opensmd.native.toolchain import Toolchain, find_compiler
from tests.support.patience import PATIENCE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Compiling takes half a minute on two free cores, several on busy ones.
pytestmark = pytest.mark.timeout(450)

# Added to the flags of the recipe for the core.
FLAGS = {
    "plain": (),
    "tsan": ("-O1", "-g1", "-Wextra", "-Werror", "-fsanitize=thread"),
}
PROGRAMS = {
    "plain": [
        "test_kernels",
        "test_levels",
        "test_collectives",
        "test_mailbox",
        "test_faults",
        "test_events",
    ],
    "tsan": ["test_collectives", "test_mailbox", "test_events"],
}


def compiler() -> Toolchain:
    found = find_compiler(Settings.from_environment().compiler)
    assert found is not None, "these tests need a C++ compiler"
    return found


@cache
def build(flavour: str) -> Path:
    """Compile the core and the flavour's programs, and return the folder they are in."""
    kept = private_folder(Settings.from_environment().cache_dir) / "objects"
    flags = FLAGS[flavour]
    kept.mkdir(exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="compiling-", dir=kept))
    try:
        objects = compile_units(
            recipe.units(core_only=True),
            compiler(),
            kept,
            folder=unfinished,
            what="the core for its tests",
            flags=flags,
        )
    finally:
        shutil.rmtree(unfinished)
    folder = ROOT / "build" / "native" / flavour
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=2) as pool:
        for done in [pool.submit(link, folder / name, objects, flags) for name in PROGRAMS[flavour]]:
            done.result()
    return folder


def link(program: Path, objects: list[Path], flags: tuple[str, ...]) -> None:
    """Compile one test program, unless nothing has changed that it is made of."""
    headers = sorted([*HERE.glob("*.hpp"), *recipe.SOURCES.rglob("*.hpp")])
    texts = [path.read_bytes() for path in [HERE / f"{program.name}.cpp", *headers]]
    names = " ".join([compiler().key, *map(str, objects), *flags])
    key = hashlib.sha256(b"\0".join([names.encode(), *texts])).hexdigest()
    stamp = program.with_suffix(".key")
    if program.exists() and stamp.exists() and stamp.read_text() == key:
        return
    core = recipe.compile_flags(recipe.units(core_only=True)[0])
    # tests need no fast loops of their own, and are quicker to compile so
    command = [*compiler().command, *core, "-O1", "-g1", "-Wextra", "-Werror", *flags]
    command += [str(HERE / f"{program.name}.cpp"), *map(str, objects), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    stamp.write_text(key)


def run(program: Path) -> None:
    """Run one test program; its own messages say which check failed."""
    done = subprocess.run([program], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"{program.name} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "ok  " in done.stdout, "the program ran no test"


@pytest.mark.parametrize("program", PROGRAMS["plain"])
def test_native_core_passes_its_own_tests(program: str) -> None:
    run(build("plain") / program)


@pytest.mark.parametrize("program", PROGRAMS["tsan"])
def test_native_core_has_no_data_race(program: str) -> None:
    run(build("tsan") / program)

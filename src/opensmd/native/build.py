"""Finding the core that fits the installed torch, or compiling it, once per machine.

It comes from the wheel, the cache or the compiler, in this order. c10d::Backend is outside torch's stable ABI
and cannot be subclassed in Python, so a compiled core fits one build of torch. A build computes a key of
everything the result depends on, takes a kernel lock (which, unlike a lock file, is released when its holder
dies), compiles in a temporary folder, and renames the result into place, so that a killed build leaves
nothing that looks finished. What other users of the machine could have written is never loaded.

``python -m opensmd.native.build`` builds the core and prints where it is.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO

import torch

from opensmd.environment.private_files import open_own, private_folder
from opensmd.environment.settings import Settings
from opensmd.native.compilers import LOOK_EVERY, Compilers
from opensmd.native.errors import BuildError
from opensmd.native.objects import compile_units, is_ours, require_success
from opensmd.native.prebuilt import find_prebuilt
from opensmd.native.recipe import LIBRARIES, LINK_FLAGS, MODULE, base_key, digest, python_include, units
from opensmd.native.toolchain import Toolchain, find_compiler

__all__ = ["BuildError", "build", "compile_core", "load"]

UNFINISHED = "building-"

_loaded: list[ModuleType] = []  # at most one
_loading = threading.Lock()


def load(settings: Settings | None = None) -> ModuleType:
    """Return the compiled core as a module, built first if this machine has none yet.

    A process loads only one, whatever its settings say later: libraries change CXX (peft's BOFT does), and a
    second core would end the process by registering the same operators with torch again.

    Raises:
        BuildError: not Linux; no compiler or Python headers, and nothing in the cache; or a failed build.
    """
    with _loading:
        if not _loaded:
            _loaded.append(_load(build(settings)))
        return _loaded[0]


def _load(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, library)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"the compiled core {library} cannot be loaded: {error}. Remove it and run "
            "`python -m opensmd.native.build`; where its folder is mounted noexec, set "
            "OPENSMD_CACHE_DIR to another."
        ) from error
    return module


def build(settings: Settings | None = None) -> Path:
    """Return the path of the compiled core for this torch, found or built.

    Raises:
        BuildError: as :func:`load`.
    """
    if sys.platform != "linux":
        raise BuildError(f"the shared-memory core runs on Linux only; this is {sys.platform}.")
    return find_prebuilt() or compile_core(settings)


def compile_core(settings: Settings | None = None) -> Path:
    """Return the core in the cache for this torch, compiler and source, after compiling it if it is missing.

    Raises:
        BuildError: as :func:`load`.
    """
    settings = settings or Settings.from_environment()
    cache_dir, base = _cache_dir(settings), base_key()
    toolchain = find_compiler(settings.compiler)
    if toolchain is None:
        return _any_finished(cache_dir, base)
    target = cache_dir / f"{base}-{digest([toolchain.key])[:8]}"
    library = target / f"{MODULE}.so"
    if is_ours(library):
        return library
    _require_python_headers()
    try:
        with _lock(cache_dir, target.name):
            if not is_ours(library):
                _remove_wrecks(cache_dir, target.name)
                _remove_planted(target)
                _build_into(target, toolchain)
    except OSError as error:
        raise BuildError(
            f"cannot build in {cache_dir}: {error}. Set OPENSMD_CACHE_DIR to a folder that can be written to."
        ) from error
    return library


def _cache_dir(settings: Settings) -> Path:
    """Return the folder of compiled cores: the configured one, unless other users could write to it."""
    try:
        return private_folder(settings.cache_dir)
    except OSError as error:
        raise BuildError(
            f"cannot build in {settings.cache_dir}: {error}. Set OPENSMD_CACHE_DIR to a folder that can be "
            "written to."
        ) from error


def _remove_planted(target: Path) -> None:
    """Remove a library that is not ours from our place."""
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.exists():
        print(
            f"opensmd: {target} was not built by this user, or others can change it: removed", file=sys.stderr
        )
        shutil.rmtree(target)


def _build_into(target: Path, toolchain: Toolchain) -> None:
    """Compile and link in a folder next to ``target``, then rename it. The caller holds the lock."""
    folder = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{target.name}-", dir=target.parent))
    finished, unfinished = folder / "finished", folder / "unfinished"
    try:
        finished.mkdir()
        unfinished.mkdir()
        what = f"the native core for torch {torch.__version__}, once on this machine"
        objects = compile_units(units(), toolchain, target.parent / "objects", folder=unfinished, what=what)
        library = finished / f"{MODULE}.so"
        arguments = [*LINK_FLAGS, *map(str, objects), "-o", str(library), *LIBRARIES]
        with Compilers() as compilers:
            require_success(compilers.run([*toolchain.command, *arguments]), toolchain)
        library.chmod(0o755)  # regardless of the umask
        finished.chmod(0o755)
        finished.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _any_finished(cache_dir: Path, base: str) -> Path:
    """Return any compiler's build for the same torch and sources, which will do without a compiler."""
    for library in sorted(cache_dir.glob(f"{base}-*/{MODULE}.so")):
        if is_ours(library):
            return library
    raise BuildError(
        "no C++ compiler was found (looked for $CXX, c++, g++, clang++ on PATH). Install one, for example "
        "`apt-get install g++`, or set CXX to its path."
    )


def _require_python_headers() -> None:
    if not (python_include() / "Python.h").exists():
        raise BuildError(
            f"Python.h is not in {python_include()}. Install Python's headers, for example "
            "`apt-get install python3-dev`."
        )


@contextmanager
def _lock(cache_dir: Path, name: str) -> Iterator[None]:
    """Hold a kernel lock on a file of this name, which is released however the process ends."""
    with _lock_file(cache_dir, name) as file:
        while not _take(file):  # not in one wait: see compilers.result
            time.sleep(LOOK_EVERY)
        yield


def _take(file: IO[bytes]) -> bool:
    """Take the kernel lock on a file, unless another process has it; return whether it was taken."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_file(cache_dir: Path, name: str) -> IO[bytes]:
    return os.fdopen(open_own(cache_dir / f"{name}.lock"), "r+b")


def _remove_wrecks(cache_dir: Path, own: str) -> None:
    """Remove leftovers of killed builds: unfinished folders whose lock is free or our own."""
    for wreck in cache_dir.glob(f"{UNFINISHED}*"):
        name = wreck.name.removeprefix(UNFINISHED).rsplit("-", 1)[0]
        with _lock_file(cache_dir, name) as file:
            if name == own or _take(file):
                shutil.rmtree(wreck, ignore_errors=True)


def main() -> int:
    """Build the core and print where it is; the exit status is 1 if that fails."""
    try:
        library = build()
        load()
    except BuildError as error:
        print(f"opensmd: {error}", file=sys.stderr)
        return 1
    print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles csrc/ against the installed torch at first use, once a machine.

c10d::Backend is outside torch's stable ABI and cannot be subclassed in Python, so no wheel could carry it.
The steps: a key of everything the result depends on; a lock of the kernel's (free again when its holder
dies, unlike a lock file); compile in a temporary folder; rename it into place, so that a killed build leaves
nothing that looks like a finished one. What other users of the machine could have written is never loaded.

``python -m opensmd.native.build`` builds and says where.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO

import torch

from opensmd.environment.private_files import make_folder, open_own, private_folder, who_else_can_change
from opensmd.environment.settings import Settings
from opensmd.native.compilers import Compilers

__all__ = ["BuildError", "build", "load"]

MODULE = "opensmd_native"
UNFINISHED = "building-"
UNUSED_DAYS = 30  # after which kept objects are removed
SOURCES = Path(__file__).parent / "csrc"
# The core's loops are what the optimizer is for; the adapter only calls. Uncontracted arithmetic gives the
# same bits whatever the compiler.
OPTIMIZE = {"core": ("-O3", "-ffp-contract=off"), "torch": ("-O2",)}
FLAGS = ("-std=c++20", "-fPIC", "-pthread", "-fvisibility=hidden", "-g0", "-Wall")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")


class BuildError(RuntimeError):
    """The native core cannot be built or loaded here; the message says why and what to do."""


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler and what it calls itself."""

    path: str
    version: str


@dataclass(frozen=True)
class Unit:
    """What the compiler reads at once and turns into one object.

    The files of the adapter together, because each of them alone would read torch's headers, which take
    far longer than its own lines; those of the core one by one, side by side.
    """

    room: str
    sources: tuple[Path, ...]


def load(settings: Settings | None = None) -> ModuleType:
    """The compiled core as a module, built first if this machine has not yet done so.

    Raises:
        BuildError: not Linux, no compiler or no Python headers and nothing in the cache, or a failed build.
    """
    return _load(settings or Settings.from_environment())


@cache
def _load(settings: Settings) -> ModuleType:
    library = build(settings)
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
    """Path of the compiled core for this torch, compiler and source, built if it is not in the cache.

    Raises:
        BuildError: as :func:`load`.
    """
    settings = settings or Settings.from_environment()
    if sys.platform != "linux":
        raise BuildError(f"the shared-memory core runs on Linux only; this is {sys.platform}.")
    cache_dir, base = _cache_dir(settings), _base_key()
    toolchain = _find_compiler(settings)
    if toolchain is None:
        return _any_finished(cache_dir, base)
    target = cache_dir / f"{base}-{_digest([toolchain.version])[:8]}"
    library = target / f"{MODULE}.so"
    if _is_ours(library):
        return library
    _require_python_headers()
    try:
        with _lock(cache_dir, target.name):
            if not _is_ours(library):
                _remove_wrecks(cache_dir, target.name)
                _remove_planted(target)
                _build_into(target, toolchain)
    except OSError as error:
        raise BuildError(
            f"cannot build in {cache_dir}: {error}. Set OPENSMD_CACHE_DIR to a folder that can be written to."
        ) from error
    return library


def _cache_dir(settings: Settings) -> Path:
    """The folder of compiled cores: as set, unless other users could put theirs there."""
    try:
        return private_folder(settings.cache_dir)
    except OSError as error:
        raise BuildError(
            f"cannot build in {settings.cache_dir}: {error}. Set OPENSMD_CACHE_DIR to a folder that can be "
            "written to."
        ) from error


def _is_ours(built: Path) -> bool:
    """Whether a file is there that nobody but this user and root can have written or can change."""
    return built.exists() and who_else_can_change(built) is None


def _remove_planted(target: Path) -> None:
    """Make room for a library in the place of one that is not ours."""
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
    try:
        _compile(toolchain, folder, target.parent / "objects")
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(toolchain: Toolchain, folder: Path, kept: Path) -> None:
    """Every unit to an object, side by side on this process's cores; then one library.

    Objects are kept under a key of their own, so that a change to the core compiles one file of it. Those
    that no build has used for long are removed.
    """
    make_folder(kept)
    objects = {unit: kept / f"{_object_key(unit, toolchain)}.o" for unit in _units()}
    compilers = Compilers()
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        compiling = [
            pool.submit(_compile_one, compilers, toolchain, folder, unit, target)
            for unit, target in objects.items()
            if not _is_ours(target)
        ]
        try:
            for job in compiling:
                job.result()
        except BaseException:  # also Ctrl-C and SIGTERM: what is under way is of no use either
            pool.shutdown(wait=False, cancel_futures=True)
            compilers.end()
            raise
    library = folder / f"{MODULE}.so"
    paths = [str(out) for out in objects.values()]
    _run(
        compilers,
        toolchain,
        ["-shared", "-pthread", *paths, "-o", str(library), f"-L{_torch_dir() / 'lib'}", *LIBRARIES],
    )
    library.chmod(0o755)  # whatever the umask
    for each in folder.iterdir():
        if each != library:
            each.unlink()
    _prune(kept, used=set(objects.values()))


def _prune(kept: Path, used: set[Path]) -> None:
    """Note which objects this build used, and remove those that none has used for long.

    Others may build at the same time, but not from objects so old.
    """
    oldest = time.time() - UNUSED_DAYS * 86400
    for each in kept.glob("*.o"):
        with suppress(FileNotFoundError):  # another build removed it
            if each in used:
                each.touch()
            elif each.stat().st_mtime < oldest:
                each.unlink()


def _compile_one(compilers: Compilers, toolchain: Toolchain, folder: Path, unit: Unit, target: Path) -> None:
    together = folder / f"{target.stem}.cpp"
    together.write_text("".join(f'#include "{source.relative_to(SOURCES)}"\n' for source in unit.sources))
    unfinished = folder / target.name
    _run(compilers, toolchain, [*_compile_flags(unit.room), "-c", str(together), "-o", str(unfinished)])
    unfinished.chmod(0o644)
    unfinished.rename(target)


def _units() -> list[Unit]:
    """All of csrc/, what takes longest first."""
    core, adapter = (sorted((SOURCES / room).glob("*.cpp")) for room in ("core", "torch"))
    return [Unit("torch", tuple(adapter)), *(Unit("core", (source,)) for source in core)]


def _object_key(unit: Unit, toolchain: Toolchain) -> str:
    """Of a unit's sources with the headers that they may include."""
    rooms = ["core"] if unit.room == "core" else list(OPTIMIZE)
    headers = sorted(path for room in rooms for path in (SOURCES / room).glob("*.hpp"))
    names = [str(source.relative_to(SOURCES)) for source in unit.sources]
    texts = [path.read_text(encoding="utf-8") for path in [*unit.sources, *headers]]
    return _digest([*_common_key(), toolchain.version, *names, *texts])[:32]


def _run(compilers: Compilers, toolchain: Toolchain, arguments: Sequence[str]) -> None:
    command = [toolchain.path, *arguments]
    done = compilers.run(command)
    if done.returncode != 0:
        shown = "\n".join(done.stderr.splitlines()[:60])
        raise BuildError(
            f"compiling the native core failed with {toolchain.version.splitlines()[0]} "
            f"(exit status {done.returncode}).\n"
            f"{' '.join(command)}\n{shown}"
        )


def _compile_flags(room: str) -> list[str]:
    torch_include = _torch_dir() / "include"
    includes = [SOURCES]
    if room == "torch":
        includes += [torch_include, torch_include / "torch/csrc/api/include", _python_include()]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        *FLAGS,
        *OPTIMIZE[room],
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        *(f"-isystem{path}" if path != SOURCES else f"-I{path}" for path in includes),
    ]


def _base_key() -> str:
    """Of all that the result depends on, except the compiler."""
    paths = sorted(path for room in OPTIMIZE for path in (SOURCES / room).glob("*.[ch]pp"))
    texts = [f"{path.relative_to(SOURCES)}\n{path.read_text(encoding='utf-8')}" for path in paths]
    return _digest([*_common_key(), *texts])[:24]


def _common_key() -> list[str]:
    """Flags, torch, Python and machine."""
    flags = [*FLAGS, *(flag for flags in OPTIMIZE.values() for flag in flags), *LIBRARIES]
    torch_build = [torch.__version__, str(torch.version.git_version), str(torch._C._GLIBCXX_USE_CXX11_ABI)]
    return [*flags, *torch_build, platform.machine(), str(sysconfig.get_config_var("SOABI"))]


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _find_compiler(settings: Settings) -> Toolchain | None:
    for name in filter(None, [settings.compiler, "c++", "g++", "clang++"]):
        path = shutil.which(name)
        if path is None:
            continue
        told = Compilers().run([path, "--version"])
        if told.returncode == 0:
            return Toolchain(path, told.stdout.strip())
    return None


def _any_finished(cache_dir: Path, base: str) -> Path:
    """Without a compiler, the build of any other for the same torch and sources serves as well."""
    for library in sorted(cache_dir.glob(f"{base}-*/{MODULE}.so")):
        if _is_ours(library):
            return library
    raise BuildError(
        "no C++ compiler was found (looked for $CXX, c++, g++, clang++ on PATH). Install one, for example "
        "`apt-get install g++`, or set CXX to its path."
    )


def _require_python_headers() -> None:
    if not (_python_include() / "Python.h").exists():
        raise BuildError(
            f"Python.h is not in {_python_include()}. Install Python's headers, for example "
            "`apt-get install python3-dev`."
        )


@contextmanager
def _lock(cache_dir: Path, name: str) -> Iterator[None]:
    """Hold the kernel's lock on a file of this name; it is released however the process ends."""
    with _lock_file(cache_dir, name) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_file(cache_dir: Path, name: str) -> IO[bytes]:
    return os.fdopen(open_own(cache_dir / f"{name}.lock"), "r+b")


def _remove_wrecks(cache_dir: Path, own: str) -> None:
    """What killed builds left: unfinished folders whose lock nobody holds, or whose lock is our own."""
    for wreck in cache_dir.glob(f"{UNFINISHED}*"):
        name = wreck.name.removeprefix(UNFINISHED).rsplit("-", 1)[0]
        with _lock_file(cache_dir, name) as file:
            if name != own:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
            shutil.rmtree(wreck, ignore_errors=True)


def _torch_dir() -> Path:
    return Path(torch.__file__).parent


def _python_include() -> Path:
    return Path(sysconfig.get_paths()["include"])


def main() -> int:
    """Build once and say where; the exit status is 1 where it cannot be built."""
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

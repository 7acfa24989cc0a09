"""Compiling units to objects, in parallel, and caching them by key.

So a change to one folder of sources recompiles only that folder, and the tests of the core link the same
objects as the product. Objects that no build has used for long are removed.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from opensmd.cpus import allowed_cpus, cores_at_once, cpu_quota
from opensmd.environment.private_files import make_folder, who_else_can_change
from opensmd.native.compilers import Compilers, result
from opensmd.native.errors import BuildError
from opensmd.native.progress import BuildProgress, expected_pace
from opensmd.native.recipe import CompilationUnit, compile_flags, object_key
from opensmd.native.toolchain import Toolchain

__all__ = ["compile_units", "is_ours", "require_success"]

UNUSED_DAYS = 30  # after which cached objects are removed
MEMORY_EACH = 2 << 30  # bytes that a compiler may need for torch's headers
_ENDED = object()


def compile_units(
    units: Sequence[CompilationUnit],
    toolchain: Toolchain,
    kept: Path,
    *,
    folder: Path,
    what: str,
    flags: Sequence[str] = (),
) -> list[Path]:
    """Return the objects of ``units`` in the folder ``kept``, after compiling the missing ones.

    Args:
        units: the slowest first.
        toolchain: the compiler.
        kept: a folder of objects, created if needed; builds may share it.
        folder: for unfinished objects, on the same file system.
        what: what users who wait are told.
        flags: in addition to those of the recipe.

    Raises:
        BuildError: the compiler refused a unit; the message quotes it.
        OSError: ``kept`` cannot be written.
    """
    make_folder(kept)
    objects = {unit: kept / f"{object_key(unit, toolchain.key, flags)}.o" for unit in units}
    missing = {unit: path for unit, path in objects.items() if not is_ours(path)}
    if missing:
        _compile_missing(missing, toolchain, folder, flags, what)
    _prune(kept, used=set(objects.values()))
    return list(objects.values())


def require_success(done: subprocess.CompletedProcess[str], toolchain: Toolchain) -> None:
    """Look at how a compiler has ended.

    Raises:
        BuildError: the compiler failed; the message quotes it.
    """
    if done.returncode != 0:
        shown = "\n".join(done.stderr.splitlines()[:60])
        raise BuildError(
            f"compiling the native core failed with {toolchain.version.splitlines()[0]} "
            f"(exit status {done.returncode}).\n"
            f"{' '.join(done.args)}\n{shown}"
        )


def is_ours(built: Path) -> bool:
    """Whether the file exists and only this user and root can have written or can change it."""
    return built.exists() and who_else_can_change(built) is None


def _compile_missing(
    missing: dict[CompilationUnit, Path], toolchain: Toolchain, folder: Path, flags: Sequence[str], what: str
) -> None:
    workers = _workers(len(missing))
    seconds = [unit.seconds for unit in missing]
    pace = expected_pace(workers, running=os.getloadavg()[0], processors=len(allowed_cpus()))
    progress = BuildProgress(seconds, workers=workers, what=what, pace=pace)

    def compile_one(compilers: Compilers, unit: CompilationUnit, target: Path) -> Iterator[None]:
        """Yield from time to time while the compiler runs."""
        with progress.step(unit.seconds):
            together, unfinished = folder / f"{target.stem}.cpp", folder / target.name
            together.write_text(unit.text)
            arguments = [*compile_flags(unit), *flags, "-c", str(together), "-o", str(unfinished)]
            process = compilers.start([*toolchain.command, *arguments])
            while (done := result(process)) is None:
                yield
            require_success(done, toolchain)
            unfinished.chmod(0o644)
            unfinished.rename(target)

    with progress, Compilers() as compilers:
        jobs = [compile_one(compilers, *item) for item in missing.items()]
        while jobs:
            jobs[:workers] = [job for job in jobs[:workers] if next(job, _ENDED) is None]


def _workers(most: int) -> int:
    """Return how many compilers to run in parallel: one per core it may use, as far as memory allows."""
    by_memory = psutil.virtual_memory().available // MEMORY_EACH
    return max(1, min(cores_at_once(allowed_cpus(), cpu_quota()), by_memory, most))


def _prune(kept: Path, used: set[Path]) -> None:
    """Note which objects this build used, and remove those not used for long.

    Other builds may run at the same time, but not with such old objects.
    """
    oldest = time.time() - UNUSED_DAYS * 86400
    for path in kept.glob("*.o"):
        with suppress(FileNotFoundError):  # another build removed it
            if path in used:
                path.touch()
            elif path.stat().st_mtime < oldest:
                path.unlink()

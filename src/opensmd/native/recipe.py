"""What is compiled, with which flags, and keys of everything that the results depend on. Runs nothing.

The sources are everything under ``csrc``, in whatever folders. ``csrc/core`` knows neither Python nor torch;
all other folders are compiled against torch's headers, which are read once.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = [
    "LIBRARIES",
    "LINK_FLAGS",
    "MODULE",
    "CompilationUnit",
    "base_key",
    "compile_flags",
    "digest",
    "object_key",
    "python_include",
    "units",
]

MODULE = "opensmd_native"
SOURCES = Path(__file__).parent / "csrc"
CORE = "core"
# Its templates take a third of the core's time, so nothing should wait behind them.
ALONE = {"kernels.cpp"}
# Only the core's loops need optimizing; the adapter just makes calls. Uncontracted arithmetic gives the same
# bits with every compiler. No instruction set is named: the kernels choose theirs at run time, because
# machines share home folders and wheels.
OPTIMIZE_CORE = ("-O3", "-ffp-contract=off")
OPTIMIZE_ADAPTER = ("-O2",)
FLAGS = ("-std=c++20", "-fPIC", "-pthread", "-fvisibility=hidden", "-g0", "-Wall")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")
LINK_FLAGS = ("-shared", "-pthread", f"-L{Path(torch.__file__).parent / 'lib'}")


@dataclass(frozen=True)
class CompilationUnit:
    """Sources that the compiler reads together and turns into one object.

    These are groups of the core's files, or of files that use torch: separately, each would read the same
    headers of torch or the standard library again, which takes far longer than its own lines.
    """

    sources: tuple[Path, ...]
    core: bool  # compiled without torch and Python

    @property
    def seconds(self) -> float:
        """Roughly how long one processor takes; only proportions matter."""
        lines = sum(_text(source).count("\n") for source in self.sources)
        if not self.core:
            return 22 + 0.0055 * lines
        return 16 if self.sources[0].name in ALONE else 1 + 0.003 * lines

    @property
    def text(self) -> str:
        """The source that includes them all."""
        return "".join(f'#include "{source.relative_to(SOURCES)}"\n' for source in self.sources)


def units(*, core_only: bool = False) -> list[CompilationUnit]:
    """Return all units of ``csrc``, the slowest first."""
    groups: dict[tuple[bool, bool], list[Path]] = {}
    for source in sorted(SOURCES.rglob("*.cpp")):
        groups.setdefault((_folder(source) == CORE, source.name in ALONE), []).append(source)
    every = [CompilationUnit(tuple(sources), core=core) for (core, _), sources in groups.items()]
    chosen = [unit for unit in every if unit.core or not core_only]
    return sorted(chosen, key=lambda unit: unit.seconds, reverse=True)


def compile_flags(unit: CompilationUnit) -> list[str]:
    """Return a unit's flags, which are the same for all compilers."""
    flags = [*FLAGS, *(OPTIMIZE_CORE if unit.core else OPTIMIZE_ADAPTER), f"-I{SOURCES}"]
    if not unit.core:
        include = Path(torch.__file__).parent / "include"
        folders = [include, include / "torch/csrc/api/include", python_include()]
        flags += [f"-isystem{path}" for path in folders]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [*flags, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-DTORCH_EXTENSION_NAME={MODULE}"]


def python_include() -> Path:
    """Return the folder of Python's headers."""
    return Path(sysconfig.get_paths()["include"])


def base_key() -> str:
    """Return the key of all that the library depends on, except the compiler."""
    paths = sorted(path for path in SOURCES.rglob("*.[ch]pp"))
    return digest([*_common_key(), *(f"{path.relative_to(SOURCES)}\n{_text(path)}" for path in paths)])[:24]


def object_key(unit: CompilationUnit, compiler: str, flags: Sequence[str] = ()) -> str:
    """Return the key of a unit's sources, the headers they may include, the compiler and extra ``flags``."""
    headers = sorted(path for path in SOURCES.rglob("*.hpp") if not unit.core or _folder(path) == CORE)
    files = [f"{path.relative_to(SOURCES)}\n{_text(path)}" for path in [*unit.sources, *headers]]
    return digest([*_common_key(), compiler, *flags, *files])[:32]


def digest(parts: Sequence[str]) -> str:
    """Return one digest of several texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _common_key() -> list[str]:
    """Return the key of flags, torch, Python and machine."""
    flags = [*FLAGS, *OPTIMIZE_CORE, *OPTIMIZE_ADAPTER, *LIBRARIES]
    torch_build = [torch.__version__, str(torch.version.git_version), str(torch._C._GLIBCXX_USE_CXX11_ABI)]
    return [*flags, *torch_build, platform.machine(), str(sysconfig.get_config_var("SOABI"))]


def _folder(path: Path) -> str:
    return path.relative_to(SOURCES).parts[0]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")

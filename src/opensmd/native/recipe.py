"""What is compiled, with which flags, and the keys of all that the results depend on. Runs nothing.

The sources are all that lies below ``csrc``, however it is cut into folders. ``csrc/core`` knows neither
Python nor torch; all other folders are compiled against torch's headers, which are read once.
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
# Its templates take a third of the core's time, so that nothing should wait behind them.
ALONE = {"kernels.cpp"}
# The core's loops are what the optimizer is for; the adapter only calls. Uncontracted arithmetic gives the
# same bits whatever the compiler. No instruction set is named: the kernels choose theirs at run time, because
# home folders and wheels are shared by machines.
OPTIMIZE_CORE = ("-O3", "-ffp-contract=off")
OPTIMIZE_ADAPTER = ("-O2",)
FLAGS = ("-std=c++20", "-fPIC", "-pthread", "-fvisibility=hidden", "-g0", "-Wall")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")
LINK_FLAGS = ("-shared", "-pthread", f"-L{Path(torch.__file__).parent / 'lib'}")


@dataclass(frozen=True)
class CompilationUnit:
    """Sources that the compiler reads at once and turns into one object.

    The core's files together, and those of all that knows torch: each of them alone would read the same
    headers again, torch's or the standard library's, which takes far longer than its own lines.
    """

    sources: tuple[Path, ...]
    core: bool  # compiled without torch and Python

    @property
    def seconds(self) -> float:
        """About how long one processor takes; the proportions are what counts."""
        lines = sum(_text(source).count("\n") for source in self.sources)
        if not self.core:
            return 22 + 0.0055 * lines
        return 16 if self.sources[0].name in ALONE else 1 + 0.003 * lines

    @property
    def text(self) -> str:
        """The file that includes them all."""
        return "".join(f'#include "{source.relative_to(SOURCES)}"\n' for source in self.sources)


def units(*, core_only: bool = False) -> list[CompilationUnit]:
    """All of ``csrc``, what takes longest first."""
    groups: dict[tuple[bool, bool], list[Path]] = {}
    for source in sorted(SOURCES.rglob("*.cpp")):
        groups.setdefault((_folder(source) == CORE, source.name in ALONE), []).append(source)
    every = [CompilationUnit(tuple(sources), core=core) for (core, _), sources in groups.items()]
    chosen = [unit for unit in every if unit.core or not core_only]
    return sorted(chosen, key=lambda unit: unit.seconds, reverse=True)


def compile_flags(unit: CompilationUnit) -> list[str]:
    """How a unit is compiled, whatever the compiler."""
    flags = [*FLAGS, *(OPTIMIZE_CORE if unit.core else OPTIMIZE_ADAPTER), f"-I{SOURCES}"]
    if not unit.core:
        include = Path(torch.__file__).parent / "include"
        found = [include, include / "torch/csrc/api/include", python_include()]
        flags += [f"-isystem{path}" for path in found]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [*flags, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-DTORCH_EXTENSION_NAME={MODULE}"]


def python_include() -> Path:
    """Where Python's headers belong."""
    return Path(sysconfig.get_paths()["include"])


def base_key() -> str:
    """Of all that the library depends on, except the compiler."""
    paths = sorted(path for path in SOURCES.rglob("*.[ch]pp"))
    return digest([*_common_key(), *(f"{path.relative_to(SOURCES)}\n{_text(path)}" for path in paths)])[:24]


def object_key(unit: CompilationUnit, compiler: str, flags: Sequence[str] = ()) -> str:
    """Of a unit's sources with the headers that they may include, the compiler and ``flags`` added for it."""
    headers = sorted(path for path in SOURCES.rglob("*.hpp") if not unit.core or _folder(path) == CORE)
    files = [f"{path.relative_to(SOURCES)}\n{_text(path)}" for path in [*unit.sources, *headers]]
    return digest([*_common_key(), compiler, *flags, *files])[:32]


def digest(parts: Sequence[str]) -> str:
    """One word for many texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _common_key() -> list[str]:
    """Flags, torch, Python and machine."""
    flags = [*FLAGS, *OPTIMIZE_CORE, *OPTIMIZE_ADAPTER, *LIBRARIES]
    torch_build = [torch.__version__, str(torch.version.git_version), str(torch._C._GLIBCXX_USE_CXX11_ABI)]
    return [*flags, *torch_build, platform.machine(), str(sysconfig.get_config_var("SOABI"))]


def _folder(path: Path) -> str:
    return path.relative_to(SOURCES).parts[0]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")

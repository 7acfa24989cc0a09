"""Compiles the benchmarks' own small C and C++ files for the machine at hand."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["build"]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "out" / "bench" / "native"


def build(source: Path, *flags: str, shared: bool = True) -> Path:
    """Compile ``source`` into a shared library (or a program), unless that is newer than its folder."""
    target = BUILD / (source.stem + (".so" if shared else ""))
    newest = max(path.stat().st_mtime for path in source.parent.iterdir())
    if target.exists() and target.stat().st_mtime > newest:
        return target
    BUILD.mkdir(parents=True, exist_ok=True)
    is_c = source.suffix == ".c"
    compiler = os.environ.get("CC", "cc") if is_c else os.environ.get("CXX", "c++")
    kind = ["-shared", "-fPIC"] if shared else []
    standard = [] if is_c else ["-std=c++17"]
    mine = target.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O3", "-march=native", *standard, *kind, str(source), "-o", str(mine), *flags]
    subprocess.run(command, check=True)
    mine.rename(target)
    return target

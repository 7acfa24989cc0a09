"""What ``smd doctor`` checks: one function per item, each saying what is there and how to fix it.

A check tries the thing itself (creates the memory, loads the core) rather than guess from versions.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import platform
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from opensmd import tested_torch
from opensmd.cpus import allowed_cpus, cpu_quota
from opensmd.launch import affinity

__all__ = ["CHECKS", "Finding"]

ENOUGH_SHM = 256 << 20  # bytes of /dev/shm below which large groups may have to use other memory


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``state`` is "good", "note" (works, could be better) or "bad"."""

    what: str
    state: str
    text: str
    mend: str = ""


def check_torch() -> Finding:
    """The installed torch, and CUDA if it has it."""
    import torch

    cuda = (
        f"CUDA {torch.version.cuda}, {_count(torch.cuda.device_count(), 'device')}"
        if torch.version.cuda
        else "CPU only"
    )
    text = f"{torch.__version__} ({cuda}), Python {platform.python_version()}"
    if not tested_torch.is_tested(torch.__version__):
        mend = f"not among the tested versions: pip install '{tested_torch.REQUIREMENT}'"
        return Finding("torch", "note", text, mend)
    return Finding("torch", "good", text)


def check_compiler() -> Finding:
    """A C++ compiler and Python's headers, which are needed unless the native core came prebuilt."""
    from opensmd.native.errors import BuildError
    from opensmd.native.prebuilt import find_prebuilt
    from opensmd.native.toolchain import find_compiler

    if find_prebuilt() is not None:
        return Finding("compiler", "good", "not needed: the package brought a core for this torch")
    try:
        compiler = find_compiler(os.environ.get("CXX") or None)
    except BuildError as error:
        return Finding("compiler", "bad", "no usable C++ compiler", str(error))
    if compiler is None:
        return Finding("compiler", "bad", "no C++ compiler on PATH", "apt-get install g++, or set CXX")
    path = " ".join(compiler.command)
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return Finding("compiler", "bad", f"{path}, but no Python.h", "apt-get install python3-dev")
    return Finding("compiler", "good", path)


def check_core() -> Finding:
    """The native core: built if needed, and loaded."""
    from opensmd.native import build

    try:
        library = build.build()
        build.load()
    except build.BuildError as error:
        # do not repeat what the compiler's own finding says
        mend = "first the compiler, see above" if check_compiler().state == "bad" else str(error)
        return Finding("native core", "bad", "not usable; Gloo, much slower, stands in", mend)
    return Finding("native core", "good", str(library))


def check_shm(path: str = "/dev/shm") -> Finding:
    """Shared memory by name."""
    if not Path(path).is_dir():
        return Finding("shared memory", "note", f"no {path}", "memory without a name is used instead")
    free = shutil.disk_usage(path).free
    text = f"{path}: {free >> 20} MiB free"
    if free < ENOUGH_SHM:
        return Finding(
            "shared memory", "note", text, "in a container: docker run --shm-size=1g (or --ipc=host)"
        )
    return Finding("shared memory", "good", text)


def check_memfd() -> Finding:
    """Shared memory without a name, which cannot be left behind."""
    if not hasattr(os, "memfd_create"):
        return Finding("memfd", "bad", "this system has no memfd_create", "use Linux 3.17 or newer")
    try:
        fd = os.memfd_create("smd-doctor")
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            with mmap.mmap(fd, mmap.PAGESIZE) as memory:
                memory[0] = 1
        finally:
            os.close(fd)
    except OSError as error:
        return Finding(
            "memfd", "bad", f"memfd_create fails: {error}", "allow it in the container's seccomp profile"
        )
    return Finding("memfd", "good", "memfd_create works")


def check_watching() -> Finding:
    """Noticing at once that a peer has died."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Finding("pidfd", "note", f"pidfd_open fails: {error}", "use Linux 5.3 or newer")
    return Finding("pidfd", "good", "the death of a rank is noticed at once")


def check_cores() -> Finding:
    """The number of cores this process may use, by mask and by quota."""
    cpus, cores = allowed_cpus(), affinity.local_cores()
    text = f"{_count(len(cores), 'core')}, {len(cpus)} of {_count(os.cpu_count() or 1, 'cpu')} allowed"
    quota = cpu_quota()
    if quota is not None and quota < len(cpus):
        most = _count(max(1, int(quota)), "rank")
        mend = (
            f"use at most {most} or as many threads, as smdrun does, or raise the quota (docker run --cpus)"
        )
        return Finding(
            "cores", "note", f"{text}, but the container may use {quota:g} of them at a time", mend
        )
    if len(cores) < 2:
        return Finding("cores", "note", text, "two ranks will share one core")
    return Finding("cores", "good", text)


def check_threads(environ: Mapping[str, str] = os.environ) -> Finding:
    """Thread counts and affinities that the environment sets for every rank."""
    chosen = affinity.chosen_by_user(environ)
    threads = environ.get("OMP_NUM_THREADS")
    if chosen is not None:
        return Finding(
            "threads", "note", f"{chosen}={environ[chosen]}: smdrun pins nothing", f"unset {chosen}"
        )
    if threads is not None:
        return Finding("threads", "good", f"OMP_NUM_THREADS={threads}, which smdrun keeps")
    return Finding("threads", "good", "smdrun divides the cores among the ranks")


def check_mpi() -> Finding:
    """An MPI launcher, and mpi4py for the legacy package's mpi backend."""
    launcher = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    binding = importlib.util.find_spec("mpi4py") is not None
    text = f"{launcher or 'no mpiexec'}, mpi4py {'found' if binding else 'missing'}"
    if launcher is None or not binding:
        return Finding("MPI", "note", text, "only for mpiexec and backend 'mpi': pip install 'opensmd[mpi]'")
    return Finding("MPI", "good", text)


def check_network() -> Finding:
    """The loopback on which ranks of one host meet, and this host's own name."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding(
            "network",
            "bad",
            f"cannot listen on 127.0.0.1: {error}",
            "bring the loopback up: ip link set lo up",
        )
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError):  # Python cannot encode names that DNS cannot have
        return Finding(
            "network",
            "note",
            f"loopback works; the host name {name} does not resolve",
            f"only for several hosts: add {name} to /etc/hosts, or give --master-addr as an IP address",
        )
    return Finding("network", "good", f"loopback works, {name} is {address}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_torch,
    check_compiler,
    check_core,
    check_shm,
    check_memfd,
    check_watching,
    check_cores,
    check_threads,
    check_mpi,
    check_network,
)

"""All settings of the smddp backend and its core, read from the environment only here.

Each field names its variable; docs/backend.md has the same table for users.
"""

from __future__ import annotations

import difflib
import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opensmd.environment.private_files import temporary_folder

__all__ = ["COMPRESSIONS", "KEEP_TENSORS", "VARIABLES", "Settings", "misspelt"]

# How float32 values may travel between hosts.
COMPRESSIONS = ("bf16", "fp16", "int8")

KEEP_TENSORS = "OPENSMD_KEEP_TENSORS"  # smdrun sets it unless the user has chosen an allocator

# Those of the whole package, also where they are read in other files.
VARIABLES = frozenset(
    f"OPENSMD_{name}"
    for name in (
        *("CACHE_DIR", "COMPRESSION", "FILLED", "HEAP_BYTES", "HOST_ID", "JOB_SECRET", "JOB_SECRET_FILE"),
        *("KEEP_TENSORS", "LEGACY_ENGINE", "LEGACY_INTERFACE", "LEGACY_TIMEOUT", "NATIVE", "NETWORK"),
        *("NETWORK_REPORT", "OFFLOAD_DIR", "TIMELINE"),
    )
)
_ALIKE = 0.85  # of 1; scripts may have variables of their own that begin like ours

# What may be said about the network and its hosts, as in `smd plan comm`, in SI units.
_SPEEDS = {"link": 1e9 / 8, "delay": 1e-6, "memory": 1e9, "sockets": 1e9, "message": 1e-6}

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_MOST_BYTES = 1 << 47  # that a process can address


@dataclass(frozen=True)
class Settings:
    """The backend's settings, with their defaults.

    Attributes:
        cache_dir: where compiled cores are kept (``OPENSMD_CACHE_DIR``, default ``~/.cache/opensmd``,
            or ``/tmp/opensmd-<user id>`` for a user without a home folder).
        native: use the compiled core; otherwise Gloo serves the group (``OPENSMD_NATIVE``, default on).
        compiler: the C++ compiler (``CXX``, default the first of c++, g++, clang++ on PATH).
        host_id: replaces this machine's own identity (``OPENSMD_HOST_ID``); processes with different values
            never share memory. For tests and unusual containers.
        heap_bytes: address space for each rank's zero-copy memory in a group, in bytes
            (``OPENSMD_HEAP_BYTES``, default: half of the machine's memory shared by the group's ranks; only
            pages in use cost memory). Rank 0's value counts.
        compression: how sums and averages of float32 values travel between hosts, one of
            :data:`COMPRESSIONS` (``OPENSMD_COMPRESSION``, default: exactly). Must be the same on all ranks.
        keep_tensors: take large CPU tensors from memory that ranks of a split model keep between steps
            (``OPENSMD_KEEP_TENSORS``, default off).
        network: known properties of the network between hosts and of the hosts, which need not be measured or
            guessed, by the fields of :class:`opensmd.collectives.hosts.cost_model.Cluster`
            (``OPENSMD_NETWORK``, default: nothing). Rank 0's value counts.
        network_report: let rank 0 of each group between hosts print what it knows about its network, and its
            conclusions (``OPENSMD_NETWORK_REPORT``, default off).
        build_error: why ``smdrun`` could not build the core for its ranks, which then do not try
            (``SMDRUN_BUILD_ERROR``, set only by smdrun).
    """

    cache_dir: Path
    native: bool = True
    compiler: str | None = None
    host_id: str | None = None
    heap_bytes: int | None = None
    compression: str | None = None
    keep_tensors: bool = False
    build_error: str | None = None
    network: Mapping[str, float] = field(default_factory=dict)
    network_report: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from ``environment`` (default: ``os.environ``).

        Raises:
            ValueError: a variable has a value that its setting does not accept.
        """
        env = os.environ if environment is None else environment
        return cls(
            cache_dir=_cache_dir(env),
            native=_flag(env, "OPENSMD_NATIVE", default=True),
            compiler=env.get("CXX") or None,
            host_id=env.get("OPENSMD_HOST_ID") or None,
            heap_bytes=_bytes(env, "OPENSMD_HEAP_BYTES"),
            compression=_choice(env, "OPENSMD_COMPRESSION", COMPRESSIONS),
            keep_tensors=_flag(env, KEEP_TENSORS, default=False),
            build_error=env.get("SMDRUN_BUILD_ERROR") or None,
            network=_speeds(env, "OPENSMD_NETWORK"),
            network_report=_flag(env, "OPENSMD_NETWORK_REPORT", default=False),
        )


def misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that are none of this package's, and the ones that they were probably meant to be."""
    strangers = sorted(name for name in environment if name.startswith("OPENSMD_") and name not in VARIABLES)
    meant = {name: difflib.get_close_matches(name, VARIABLES, n=1, cutoff=_ALIKE) for name in strangers}
    return {name: close[0] for name, close in meant.items() if close}


def _cache_dir(env: Mapping[str, str]) -> Path:
    chosen = Path(env.get("OPENSMD_CACHE_DIR") or "~/.cache/opensmd")
    try:
        if chosen.parts[0] == "~" and os.environ.get("HOME") == "":  # as if it were not set
            return Path(pwd.getpwuid(os.getuid()).pw_dir, *chosen.parts[1:])
        return chosen.expanduser()
    except (KeyError, RuntimeError):  # no HOME, and this user has no home on record, as in containers
        return temporary_folder()


def _flag(env: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = env.get(name, "").strip().lower()
    if not text:
        return default
    if text not in _TRUE | _FALSE:
        raise ValueError(f"{name}={env[name]!r}: expected 1 or 0")
    return text in _TRUE


def _choice(env: Mapping[str, str], name: str, choices: Sequence[str]) -> str | None:
    text = env.get(name, "").strip().lower()
    if not text or text == "none":
        return None
    if text not in choices:
        raise ValueError(f"{name}={env[name]!r}: expected none, {', '.join(choices)}")
    return text


def _bytes(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) > _MOST_BYTES:
        raise ValueError(
            f"{name}={env[name]!r}: expected a number of bytes up to {_MOST_BYTES}, for example {1 << 30}"
        )
    return int(text)


def _speeds(env: Mapping[str, str], name: str) -> dict[str, float]:
    """Parse ``link=10,delay=20``."""
    speeds = {}
    for part in filter(None, env.get(name, "").replace(" ", "").split(",")):
        key, _, text = part.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if key not in _SPEEDS or not (
            0 < value < float("inf") or (value == 0 and key in ("delay", "message"))
        ):
            raise ValueError(
                f"{name}={env[name]!r}: expected some of link=GBIT, delay=US, memory=GB, sockets=GB and "
                "message=US with positive numbers, for example link=10,delay=20"
            )
        speeds[key] = value * _SPEEDS[key]
    return speeds

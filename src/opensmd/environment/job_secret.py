"""The secret of a job on several hosts, with which its processes authenticate messages.

torch's stores and Gloo's connections do not authenticate anybody. A user who cannot keep strangers off the
network gives all hosts of a job one secret. Then everything that this package reads from the network and acts
on has a message authentication code (HMAC-SHA256), which requires the secret. Above all, no pickle, which can
run any code, is loaded without one. Nothing is encrypted, and recorded messages can be replayed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

__all__ = ["FILE", "OF_LAUNCHER", "PROOF_BYTES", "VARIABLE", "JobSecret", "SecretError", "given"]

VARIABLE = "OPENSMD_JOB_SECRET"
FILE = "OPENSMD_JOB_SECRET_FILE"
OF_LAUNCHER = "SMDRUN_JOB_SECRET"  # set by smdrun for a job on one host
LEAST = 16  # characters
_MARK = b"opensmd-sealed:"
PROOF_BYTES = hashlib.sha256().digest_size


class SecretError(RuntimeError):
    """A message was not made with this job's secret."""


class JobSecret:
    """A key for sealing messages and opening those of others.

    Args:
        key: the same on all hosts of a job.
        by_user: whether the user chose it, or smdrun for one host.
    """

    def __init__(self, key: bytes, *, by_user: bool = True) -> None:
        self._key = key
        self.by_user = by_user

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> JobSecret | None:
        """Read the secret from ``OPENSMD_JOB_SECRET`` or the file that ``OPENSMD_JOB_SECRET_FILE`` names.

        Otherwise use that of smdrun, which creates one for jobs on one host.

        Raises:
            ValueError: it is too short, the file cannot be read, or other users can read it.
        """
        env = os.environ if environment is None else environment
        text = given(env)
        if text is None:
            key = env.get(OF_LAUNCHER)
            return None if not key else cls(key.encode(), by_user=False)
        return cls(text.encode())

    def proof(self, purpose: str, *parts: bytes) -> bytes:
        """Return a code for ``parts`` and a purpose that requires the secret."""
        code = hmac.new(self._key, purpose.encode(), hashlib.sha256)
        for part in parts:
            code.update(len(part).to_bytes(8, "big"))
            code.update(part)
        return code.digest()

    def proves(self, given: bytes, purpose: str, *parts: bytes) -> bool:
        """Whether ``given`` is the proof of these parts."""
        return hmac.compare_digest(given, self.proof(purpose, *parts))

    def seal(self, purpose: str, data: bytes) -> bytes:
        """Return ``data`` with its code in front."""
        return _MARK + self.proof(purpose, data) + data

    def open(self, purpose: str, sealed: bytes) -> bytes:
        """Return the data of a sealed message for this purpose.

        Raises:
            SecretError: it was made without this secret or for another purpose, or has been changed.
        """
        code, data = sealed[len(_MARK) : len(_MARK) + PROOF_BYTES], sealed[len(_MARK) + PROOF_BYTES :]
        if not sealed.startswith(_MARK):
            why = "bears no code of this job's secret"
        elif not self.proves(code, purpose, data):
            why = "was made with another secret, or has been changed on its way"
        else:
            return data
        raise SecretError(
            f"a message ({purpose}) {why}. Give {VARIABLE}, or {FILE}, alike to all processes of the job on "
            "all hosts; if they have it, somebody else writes to the job's network: see docs/trust.md"
        )


def given(environment: Mapping[str, str]) -> str | None:
    """Return the secret that the user has given this job, in a variable or a file.

    Raises:
        ValueError: as :meth:`JobSecret.from_environment`.
    """
    text, where = environment.get(VARIABLE, ""), VARIABLE
    if not text and environment.get(FILE):
        text, where = _read(Path(environment[FILE])), f"{FILE}={environment[FILE]}"
    if text and len(text) < LEAST:
        raise ValueError(
            f"{where}: a job's secret has at least {LEAST} characters, this one has {len(text)}; make "
            "one with: openssl rand -hex 32"
        )
    return text or None


def _read(path: Path) -> str:
    """Read a file that only this user can read and write."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o077:
                raise ValueError(
                    f"{FILE}={path}: other users can read or write this file; it must be yours: "
                    f"chmod 600 {path}"
                )
            text = file.read().decode().strip()
    except OSError as error:
        raise ValueError(f"{FILE}={path}: cannot read it: {error.strerror}") from error
    if not text:
        raise ValueError(f"{FILE}={path}: the file is empty")
    return text

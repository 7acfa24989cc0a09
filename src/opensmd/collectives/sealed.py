"""Messages of a job with a secret: sealed on sending, and opened before anything acts on them.

Without a secret, they travel unchanged.
"""

from __future__ import annotations

import io
import pickle
from functools import cache
from typing import Any

from opensmd.collectives import _torch_internals
from opensmd.environment.job_secret import JobSecret

__all__ = ["dumps", "job_secret", "loads", "open_text", "seal_objects_of_torch", "seal_text"]

_OBJECT = "object"


@cache
def job_secret() -> JobSecret | None:
    """Return this job's secret, if it has one; read once per process.

    Raises:
        ValueError: the secret cannot be used.
    """
    return JobSecret.from_environment()


def dumps(value: Any) -> bytes:
    """Pickle a value for another process of the job.

    Raises:
        Exception: whatever pickle raises for a value that it cannot handle.
    """
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    secret = job_secret()
    return data if secret is None else secret.seal(_OBJECT, data)


def loads(data: bytes) -> Any:
    """Return the value from :func:`dumps`.

    Raises:
        SecretError: the job has a secret, and whoever sent this did not know it.
    """
    secret = job_secret()
    return pickle.loads(data if secret is None else secret.open(_OBJECT, data))


def seal_text(purpose: str, text: str) -> bytes:
    """Seal a text for another process of the job, valid only under this name."""
    secret = job_secret()
    return text.encode() if secret is None else secret.seal(purpose, text.encode())


def open_text(purpose: str, data: bytes) -> str:
    """Return the text from :func:`seal_text`.

    Raises:
        SecretError: the job has a secret, and whoever wrote this did not know it.
    """
    secret = job_secret()
    return (data if secret is None else secret.open(purpose, data)).decode()


def seal_objects_of_torch() -> None:
    """If the job has a secret, let torch's object collectives load no pickle that was made without it.

    This covers all of them, in any group: ``broadcast_object_list``, ``all_gather_object`` and others. It
    applies only to secrets chosen by the user, because ranks that never import this package do not seal.

    Raises:
        ValueError: the secret cannot be used.
    """
    secret = job_secret()
    if secret is not None and secret.by_user:
        _torch_internals.pickle_objects_with(_Pickler, _Unpickler)


class _Pickler:
    """The part of ``pickle.Pickler`` that torch's object collectives use."""

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file

    def dump(self, value: Any) -> None:
        self._file.write(dumps(value))


class _Unpickler:
    """The part of ``pickle.Unpickler`` that torch's object collectives use."""

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file

    def load(self) -> Any:
        return loads(self._file.read())

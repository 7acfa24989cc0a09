"""What ranks tell each other, with a secret of the job and without."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from opensmd.collectives import sealed
from opensmd.environment.job_secret import SecretError


@pytest.fixture
def as_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test be several jobs, one after the other."""
    yield monkeypatch
    sealed.job_secret.cache_clear()


def begin(monkeypatch: pytest.MonkeyPatch, secret: str | None) -> None:
    monkeypatch.delenv("OPENSMD_JOB_SECRET_FILE", raising=False)
    if secret is None:
        monkeypatch.delenv("OPENSMD_JOB_SECRET", raising=False)
    else:
        monkeypatch.setenv("OPENSMD_JOB_SECRET", secret)
    sealed.job_secret.cache_clear()


@pytest.mark.parametrize("secret", [None, "a secret of the job's own"])
def test_values_and_texts_come_back(as_job: pytest.MonkeyPatch, secret: str | None) -> None:
    begin(as_job, secret)
    assert sealed.loads(sealed.dumps({"step": [1, None]})) == {"step": [1, None]}
    assert sealed.open_text("identity", sealed.seal_text("identity", "rank 0, Zürich")) == "rank 0, Zürich"


class Stranger:
    """What runs code when it is unpickled."""

    ran = 0

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return count_run, ()


def count_run() -> int:
    Stranger.ran += 1
    return Stranger.ran


@pytest.mark.parametrize("other", [None, "a secret of another job"])
def test_nothing_of_a_stranger_is_unpickled(as_job: pytest.MonkeyPatch, other: str | None) -> None:
    begin(as_job, other)
    data, text = sealed.dumps(Stranger()), sealed.seal_text("identity", "rank 0")
    begin(as_job, "a secret of the job's own")
    for strange in (data, data[:-1], b"", pickle.dumps(Stranger())):
        with pytest.raises(SecretError):
            sealed.loads(strange)
    with pytest.raises(SecretError):
        sealed.open_text("identity", text)
    assert Stranger.ran == 0


def test_a_message_cannot_be_taken_for_another(as_job: pytest.MonkeyPatch) -> None:
    begin(as_job, "a secret of the job's own")
    with pytest.raises(SecretError):
        sealed.open_text("verdict", sealed.seal_text("identity", "yes"))
    with pytest.raises(SecretError):
        sealed.loads(sealed.seal_text("identity", "yes"))

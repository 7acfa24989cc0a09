"""The secret of a job: what is sealed with it, and what is not believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.environment.job_secret import JobSecret, SecretError

OURS, THEIRS = JobSecret(b"known to the job's hosts"), JobSecret(b"a guess of a stranger")


def test_what_is_sealed_opens_for_the_same_purpose_alone() -> None:
    sealed = OURS.seal("object", b"data")
    assert OURS.open("object", sealed) == b"data"
    with pytest.raises(SecretError, match="another secret, or has been changed"):
        OURS.open("announcement", sealed)


@pytest.mark.parametrize("place", [20, -1])
def test_a_changed_message_is_refused(place: int) -> None:
    sealed = bytearray(OURS.seal("object", b"data"))
    sealed[place] ^= 1
    with pytest.raises(SecretError, match="has been changed"):
        OURS.open("object", bytes(sealed))


@pytest.mark.parametrize(
    ("sealed", "why"),
    [(b"data", "bears no code"), (b"", "bears no code"), (THEIRS.seal("object", b"data"), "another secret")],
)
def test_a_message_without_the_secret_is_refused_with_what_to_do(sealed: bytes, why: str) -> None:
    with pytest.raises(SecretError, match=f"{why}.*OPENSMD_JOB_SECRET.*alike"):
        OURS.open("object", sealed)


def test_parts_of_a_proof_do_not_run_into_each_other() -> None:
    assert OURS.proof("link", b"ab", b"c") != OURS.proof("link", b"a", b"bc")


def test_a_secret_comes_from_a_variable_or_from_a_file_of_this_user(tmp_path: Path) -> None:
    assert JobSecret.from_environment({}) is None
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    from_file = JobSecret.from_environment({"OPENSMD_JOB_SECRET_FILE": str(file)})
    from_variable = JobSecret.from_environment({"OPENSMD_JOB_SECRET": "0123456789abcdef"})
    assert from_file is not None and from_variable is not None
    assert from_file.open("object", from_variable.seal("object", b"data")) == b"data"


def test_a_secret_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    file, empty = tmp_path / "secret", tmp_path / "empty"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o640)
    empty.touch(0o600)
    for environment, why in (
        ({"OPENSMD_JOB_SECRET": "short"}, "at least 16 characters, this one has 5"),
        ({"OPENSMD_JOB_SECRET_FILE": str(file)}, "other users can read or write"),
        ({"OPENSMD_JOB_SECRET_FILE": str(empty)}, "is empty"),
        ({"OPENSMD_JOB_SECRET_FILE": str(tmp_path / "none")}, "cannot read it: No such file"),
    ):
        with pytest.raises(ValueError, match=why):
            JobSecret.from_environment(environment)

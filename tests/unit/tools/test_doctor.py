"""The doctor's findings as people and programs read them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from opensmd.tools import checks, cli, doctor
from opensmd.tools.doctor import as_lines


def test_findings_keep_their_brackets_and_are_never_wrapped() -> None:
    path = "/home/" + "very-long-name/" * 30 + "opensmd_native.so"
    lines = as_lines([checks.Finding("MPI", "note", path, "pip install 'opensmd[mpi]'")])
    assert lines[0].endswith(path)
    assert lines[1].endswith("to do: pip install 'opensmd[mpi]'")


def test_the_doctors_findings_can_be_read_by_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = checks.Finding("torch", "bad", "none", "pip install 'torch[x]'")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: bad,))
    result = CliRunner().invoke(cli.main, ["doctor", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output) == [
        {"what": "torch", "state": "bad", "text": "none", "mend": "pip install 'torch[x]'"}
    ]


def test_the_quick_checks_pass_on_this_machine_and_the_list_says_so() -> None:
    quick = [check for check in checks.CHECKS if check is not checks.check_core]
    findings = [check() for check in quick]
    assert [one.what for one in findings if one.state == "bad"] == []
    text = "\n".join(as_lines(findings))
    for finding in findings:
        assert finding.what in text

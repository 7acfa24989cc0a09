"""The folders that a script is told of: made for it, and gone afterwards if it left them empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.launch.output_folders import OutputFolders


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    output = tmp_path / "output"
    monkeypatch.setenv("SM_MODEL_DIR", str(output / "model"))
    monkeypatch.setenv("SM_OUTPUT_DATA_DIR", str(output / "data"))
    return output


def test_empty_folders_are_removed_and_others_kept(output: Path) -> None:
    with OutputFolders():
        (output / "model" / "model.pt").touch()
    assert sorted(output.rglob("*")) == [output / "model", output / "model" / "model.pt"]


def test_another_job_may_have_removed_a_folder_and_the_rest_is_removed_all_the_same(output: Path) -> None:
    with OutputFolders():
        (output / "data").rmdir()
    assert not output.exists()


def test_a_folder_that_cannot_even_be_looked_for_is_told_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / ("x" * 300)))
    with OutputFolders():
        pass
    assert "File name too long; --output names another for what scripts save" in capsys.readouterr().err

"""The folders that a script is told of: made for it, and gone afterwards if it left them empty."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from opensmd.launch.leftovers import guardian
from opensmd.launch.run import Options, _OutputFolders


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    output = tmp_path / "output"
    monkeypatch.setenv("SM_MODEL_DIR", str(output / "model"))
    monkeypatch.setenv("SM_OUTPUT_DATA_DIR", str(output / "data"))
    return output


def test_empty_folders_are_removed_and_others_kept(output: Path) -> None:
    with _OutputFolders():
        (output / "model" / "model.pt").touch()
    assert sorted(output.rglob("*")) == [output / "model", output / "model" / "model.pt"]


def test_another_job_may_remove_a_folder_at_the_same_moment(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = Path.is_dir

    def removed_after_the_look(path: Path) -> bool:
        found = looked_at(path)
        if path == output / "model":
            path.rmdir()
        return found

    with _OutputFolders():
        monkeypatch.setattr(Path, "is_dir", removed_after_the_look)
        (output / "data").rmdir()
    monkeypatch.undo()
    assert not (output / "data").exists()


def test_the_folders_of_launchers_that_are_gone_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    long_ago = time.time() - 2 * guardian.YOUNG
    with guardian.job_folder() as alive:
        for name in ("smdrun-stale", "smdrun-young", "another-stale"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "error.json").touch()
        (tmp_path / "smdrun-link").symlink_to(tmp_path / "another-stale")
        for path in (tmp_path / "smdrun-stale", tmp_path / "another-stale", alive):
            os.utime(path, (long_ago, long_ago))
        os.utime(tmp_path / "smdrun-link", (long_ago, long_ago), follow_symlinks=False)
        with guardian.job_folder():
            assert alive.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "another-stale",
        "smdrun-link",
        "smdrun-young",
    ]
    assert (tmp_path / "another-stale" / "error.json").exists()


@pytest.mark.parametrize(
    ("replicas", "hosts", "said"),
    [(3, 1, "the 4 ranks cannot be shared out evenly"), (2, 2, "works on one host")],
)
def test_replicas_that_cannot_come_and_go_are_refused(replicas: int, hosts: int, said: str) -> None:
    given = {"script": "train.py", "nnodes": hosts, "node_rank": 0, "master_addr": "a", "python": True}
    given |= {"module": False, "device": "cpu", "elastic_replicas": replicas}
    with pytest.raises(ValueError, match=said):
        Options.from_command_line(ranks=4, channel=[], mp_parameters=None, **given)

"""The folder of a job: the next launcher removes those whose launcher is gone, and nothing else."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from opensmd.launch.leftovers import guardian


def test_the_folders_of_launchers_that_are_gone_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    long_ago = time.time() - 2 * guardian.YOUNG
    old = ("smdrun-stale", "another-stale", "smdrun-mine")
    with guardian.job_folder() as alive:
        for name in ("smdrun-stale", "smdrun-young", "another-stale", "smdrun-mine"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "error.json").touch()
            if name != "smdrun-mine":
                (tmp_path / name / guardian.MARK).touch()
        (tmp_path / "smdrun-link").symlink_to(tmp_path / "another-stale")
        for path in (*(tmp_path / name for name in old), alive):
            os.utime(path, (long_ago, long_ago))
        os.utime(tmp_path / "smdrun-link", (long_ago, long_ago), follow_symlinks=False)
        with guardian.job_folder():
            assert alive.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "another-stale",
        "smdrun-link",
        "smdrun-mine",
        "smdrun-young",
    ]
    assert (tmp_path / "another-stale" / "error.json").exists()
    assert (tmp_path / "smdrun-mine" / "error.json").exists()

"""What ranks on other hosts have recorded, on its way to the host of the command."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

from opensmd.launch.hosts.recorded import fetch, folder_on_host, main, receive


def test_files_of_ranks_travel_and_nothing_stays(tmp_path: Path) -> None:
    here, there = tmp_path / "here", folder_on_host(tmp_path / "there", 1)
    here.mkdir()
    there.mkdir(parents=True)
    (there / "rank-3.events").write_text("3\n")
    archive = io.BytesIO()
    main(there, archive)
    receive(archive.getvalue(), here)
    assert [path.name for path in here.iterdir()] == ["rank-3.events"]
    assert (here / "rank-3.events").read_text() == "3\n"
    assert not (tmp_path / "there").exists()


def test_no_other_file_is_taken(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as files:
        for name in ("../rank-0.events", "rank-0.events.sh", "train.py", "/tmp/rank-0.events"):
            files.addfile(tarfile.TarInfo(name), io.BytesIO())
    receive(archive.getvalue(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_why_a_hosts_part_is_missing_is_said(tmp_path: Path) -> None:
    assert (
        fetch([sys.executable, "-c"], "import sys; sys.exit('no such folder')", tmp_path) == "no such folder"
    )
    assert "no-such-command" in (fetch(["/no-such-command"], "", tmp_path) or "")
    assert fetch([sys.executable, "-c"], "print('no archive')", tmp_path)

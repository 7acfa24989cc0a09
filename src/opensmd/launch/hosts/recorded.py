"""Fetching timeline records from other hosts to the one where the command was started.

``python -m opensmd.launch.hosts.recorded FOLDER`` runs on each of them: it writes the folder's files to its
output and deletes them.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from opensmd.launch.hosts.order import command_line

__all__ = ["fetch", "folder_on_host", "line_for", "main", "receive"]

PATIENCE = 120  # seconds per host
_NAME = re.compile(r"rank-\d+\.events$")


def folder_on_host(folder: Path, number: int) -> Path:
    """Return where a host's ranks record, separately because hosts may share a file system."""
    return folder / f"host-{number}"


def fetch(reach: Sequence[str], line: str, folder: Path) -> str | None:
    """Fetch one host's files into ``folder``; return why that was not possible.

    Args:
        reach: the command that runs a shell command on that host, without that command.
        line: from :func:`line_for`.
        folder: on this host.
    """
    try:
        done = subprocess.run(
            [*reach, line],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
            start_new_session=True,  # Ctrl-C has already ended the job
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return done.stderr.decode(errors="replace").strip().split("\n")[-1] or f"status {done.returncode}"
    try:
        receive(done.stdout, folder)
    except (OSError, tarfile.TarError) as error:
        return str(error)
    return None


def receive(archive: bytes, folder: Path) -> None:
    """Extract the ranks' files from an archive into ``folder``, and nothing else."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            content = files.extractfile(member) if _NAME.match(member.name) else None
            if content is not None:
                (folder / member.name).write_bytes(content.read())


def line_for(folder: Path, working_folder: str, environ: Mapping[str, str]) -> str:
    """Return the shell command that sends the files of ``folder`` here."""
    module = "opensmd.launch.hosts.recorded"
    return f"{command_line(sys.executable, working_folder, environ, module)} {shlex.quote(str(folder))}"


def main(folder: Path, out: BinaryIO) -> None:
    """Write the files of ``folder`` to ``out`` and remove it."""
    paths = sorted(folder.glob("rank-*.events"))
    with tarfile.open(fileobj=out, mode="w|") as files:
        for path in paths:
            files.add(path, arcname=path.name)
    for path in paths:
        path.unlink()
    with contextlib.suppress(OSError):  # other files in there are not ours
        folder.rmdir()
        folder.parent.rmdir()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.stdout.buffer)

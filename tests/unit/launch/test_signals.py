"""Signals to the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

pytestmark = pytest.mark.processes

SLOW_TORCH = """
import time
print("importing", flush=True)
time.sleep(600)
"""


def test_ctrl_c_while_torch_is_imported_ends_the_launcher_as_it_does_later(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(SLOW_TORCH)
    (tmp_path / "train.py").touch()
    command = [sys.executable, "-m", "opensmd.launch.cli", "-n", "2", "train.py"]
    launcher = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert launcher.stdout is not None and launcher.stdout.readline() == "importing\n"
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=PATIENCE)
    assert (launcher.returncode, err) == (130, "smdrun: ended by SIGINT\n")
    assert not list(tmp_path.glob("smdrun-*"))

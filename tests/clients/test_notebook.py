"""Accelerate's notebook_launcher: a process forks its ranks, one time for every cell that trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.clients.conftest import PATIENCE
from tests.clients.training import assert_trained_alike
from tests.support.ports import free_port
from tests.support.ranks import ROOT

CELLS = """
import os
import sys
import torch
from accelerate import notebook_launcher
from tests.clients.test_accelerate import train

def ranks(backend):
    torch.save(train(backend, "."), f"{backend}-{os.environ['RANK']}.pt")

for backend in ("gloo", "smddp"):
    notebook_launcher(ranks, (backend,), num_processes=2, use_port=sys.argv[1])
"""


def test_the_ranks_of_a_notebook_train_as_over_gloo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CELLS, str(free_port())],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    gloo, smddp = (
        [torch.load(tmp_path / f"{backend}-{rank}.pt", weights_only=False) for rank in range(2)]
        for backend in ("gloo", "smddp")
    )
    assert_trained_alike(gloo, smddp)

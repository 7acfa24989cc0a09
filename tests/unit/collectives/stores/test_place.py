"""A process that a rank spawns is told that it joins in its parent's place, instead of waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

SCRIPT = """
import multiprocessing
from opensmd.collectives.stores.place import require_place

{at_import}
def work():
    require_place(1, 2)

if __name__ == "__main__":
    child = multiprocessing.get_context("{method}").Process(target=work)
    child.start()
    child.join()
    print("ended with", child.exitcode)
"""


@pytest.mark.parametrize(
    ("method", "at_import", "rank", "code"),
    [
        ("spawn", "require_place(1, 2)", 1, 1),
        ("forkserver", "require_place(1, 2)", 1, 1),
        ("spawn", "", 1, 0),
        ("spawn", "require_place(1, 2)", 0, 0),
    ],
)
def test_a_child_that_imports_its_ranks_script_may_not_join_in_its_place(
    method: str, at_import: str, rank: int, code: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(method=method, at_import=at_import))
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout == f"ended with {code}\n", done.stderr
    assert ("this process was spawned by rank 1" in done.stderr) == bool(code)

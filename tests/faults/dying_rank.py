"""A script in which, in each attempt of a job, one rank kills itself after so many steps of its optimizer.

    DYING_RANKS='[[1, 3, 0.0]]' smdrun -n 2 --max-restarts 1 tests/faults/dying_rank.py train.py --steps 6

In the first attempt rank 1 dies in its third step; 0.0 are the seconds until it does. A kill from outside
could come when a quick job has ended.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

VARIABLE = "DYING_RANKS"


def main() -> None:
    """Run the script of the arguments, and die as the variable says."""
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if rank == 0:
        print(f"attempt {attempt}", flush=True)
    deaths = json.loads(os.environ[VARIABLE])
    if attempt < len(deaths) and deaths[attempt][0] == rank:
        _die_after(attempt, *deaths[attempt][1:])
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _die_after(attempt: int, steps: int, seconds: float) -> None:
    done = 0

    def die() -> None:
        print(f"killed in attempt {attempt} at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        if done == steps:
            threading.Timer(seconds, die).start() if seconds else die()

    register_optimizer_step_post_hook(count)


if __name__ == "__main__":
    main()

"""Rank 1, or all of them, come to grief in the way the command line names; the others wait for rank 1."""

import atexit
import os
import pathlib
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401


def break_down(how: str) -> None:
    """Fail as asked."""
    if how == "raise":
        raise ValueError("the batch is empty")
    if how == "exit":
        sys.exit(7)
    if how == "leave":
        sys.exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)


def wait_until_all_have_failed() -> None:
    """Let the launcher see no rank end as long as it could still end another before its error."""
    pathlib.Path(f"failed-{dist.get_rank()}").touch()
    while len(list(pathlib.Path.cwd().glob("failed-*"))) < dist.get_world_size():
        time.sleep(0.05)


how = sys.argv[1]
dist.init_process_group("smddp")
dist.barrier()
if how == "all":
    atexit.register(wait_until_all_have_failed)
    break_down("raise")
if how != "wait alone":  # something that the rank leaves behind must go as well
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("started", flush=True)
if how.startswith("wait"):
    time.sleep(600)
if dist.get_rank() == 1:
    break_down(how)
dist.all_reduce(torch.ones(1))
child.kill()

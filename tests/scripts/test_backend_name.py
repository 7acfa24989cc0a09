"""The backend by its name alone, in fresh interpreters that import nothing of this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

from tests.support.forks import ForkedProcess, as_main
from tests.support.patience import PATIENCE
from tests.support.ports import free_port

UNKNOWN = """
import gc
gc.disable()
import torch.distributed as dist
gc.freeze()
print(dist.is_backend_available("smddp"))
"""
SCRIPT = """
import gc, os, sys
from datetime import timedelta
gc.disable()
import torch
import torch.distributed as dist
gc.freeze()

rank, store = int(sys.argv[1]), sys.argv[2]
assert dist.is_backend_available("smddp")
assert "opensmd.collectives.backend" not in sys.modules and "DDP_DISABLE_COMM_MEM" not in os.environ
dist.init_process_group("smddp", init_method=f"file://{store}", rank=rank, world_size=2)
assert dist.get_backend() == "smddp"
assert os.environ["DDP_DISABLE_COMM_MEM"] == "0"
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
assert hasattr(getattr(backend, "wrapped_pg", backend), "shared_group"), backend
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
dist.monitored_barrier(timeout=timedelta(seconds=60))

import smdistributed.dataparallel.torch.torch_smddp

part = dist.new_group([0, 1], backend="smddp")
dist.all_reduce(total, group=part)
parameters = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)).parameters()
print(total.item(), len(list(parameters)))
dist.destroy_process_group()
"""


def test_two_ranks_make_a_group_by_its_name_without_an_import(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DDP_DISABLE_COMM_MEM"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SCRIPT, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=PATIENCE)
            assert out == "6.0 2\n", errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


LISTENING = """
import psutil, sys, torch.distributed as dist
dist.init_process_group("smddp", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=1)
connections = psutil.Process().net_connections("tcp")
print({where.laddr.ip for where in connections if where.status == psutil.CONN_LISTEN})
"""


def test_the_store_of_a_group_made_by_name_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    script = tmp_path / "listening.py"
    script.write_text(LISTENING)
    main = (as_main, str(script), [str(free_port())])
    process = ForkedProcess(*main, cwd=tmp_path, env=os.environ, stdout=PIPE, stderr=PIPE)
    out, errors = process.communicate(PATIENCE)
    assert out == "{'127.0.0.1'}\n", errors


def test_the_name_is_unknown_where_torch_loads_no_extensions() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNKNOWN],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout == "False\n", done.stderr

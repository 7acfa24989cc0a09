"""``smdrun --timeline``: a trace and a page of a job whose script knows nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

pytestmark = pytest.mark.processes

SCRIPT = """
import torch
import torch.distributed as dist
import smdistributed.modelparallel.torch as smp

smp.init({"partitions": 2, "microbatches": 2})
torch.manual_seed(0)
model = smp.DistributedModel(torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)]))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(data):
    loss = model(data).sum()
    model.backward(loss)
    return loss


for _ in range(3):
    train_step(torch.ones(4, 16))
    optimizer.step()
group = dist.new_group(backend="smddp")
for _ in range(50):
    dist.all_reduce(torch.ones(256), group=group)
early = dist.irecv(torch.ones(3), 1 - dist.get_rank(), group=group, tag=2)
for _ in range(5):
    if dist.get_rank() == 0:
        dist.send(torch.ones(25), 1, group=group)
    else:
        dist.recv(torch.ones(25), 0, group=group)
dist.isend(torch.ones(3), 1 - dist.get_rank(), group=group, tag=2).wait()
early.wait()
dist.destroy_process_group()
"""


def test_a_job_leaves_a_trace_and_a_page_without_a_line_of_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "opensmd.launch.cli", "-n", "2", "--timeline", "when", "train.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "smdrun: timeline: " in done.stderr
    events = json.loads((tmp_path / "when" / "trace.json").read_text())["traceEvents"]
    names = {rank: [e["name"] for e in events if e["ph"] == "X" and e["pid"] == rank] for rank in (0, 1)}
    for rank in (0, 1):
        assert names[rank].count("all_reduce") >= 50
        assert {"forward 0", "forward 1", "backward 0", "backward 1", "wait"} <= set(names[rank])
    assert names[0].count("send to rank 1") >= 6 and names[1].count("recv from rank 0") >= 6
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "expected" in tracks, "by the plan"
    early = [e for e in events if e.get("args", {}).get("bytes") == 12 and e["name"].startswith("recv")]
    assert len(early) == 2  # begun before the others and ended after them, and not lost for that
    complete = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in complete) == 0
    assert all(e["dur"] >= 0 for e in complete)
    # on one clock: no rank leaves a collective before the other has entered it
    waits = [e for e in complete if e["name"].startswith("waiting for rank")]
    assert waits
    page = (tmp_path / "when" / "timeline.html").read_text()
    assert "<th>rank 0</th>" in page and "<th>rank 1</th>" in page

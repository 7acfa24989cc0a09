"""``smdrun --timeline``: a trace and a page of a job whose script knows nothing of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.test_smddp_scripts import BIN, job
from tests.support.ports import free_port
from tests.support.ranks import ROOT

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


waited, all_have_waited = False, torch.zeros(1)
while not all_have_waited:  # what a rank needs may have come before it looks
    for _ in range(3):
        train_step(torch.ones(4, 16))
        optimizer.step()
        waited |= any(each.kind == "wait" for each in smp.state.engine.record)
    dist.all_reduce(all_have_waited.fill_(waited), dist.ReduceOp.MIN)
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
    assert "smdrun: timeline: " in smdrun(tmp_path, SCRIPT, "-n", "2")
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


GLOO = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(5):
    dist.all_reduce(torch.ones(256))
dist.all_reduce(torch.ones(1000), async_op=True).wait()
dist.all_reduce(torch.sparse_coo_tensor([[1]], [2.0], (5,), check_invariants=False))
half = torch.empty(2)
dist.reduce_scatter_tensor(half, torch.ones(4))  # whose end torch tells nobody but the one who waits
assert half.tolist() == [2, 2]
dist.barrier()
if rank == 0:
    dist.send(torch.ones(3), 1)
    dist.send(torch.ones(5), 1)
else:
    dist.recv(torch.ones(3), 0)
    dist.recv(torch.ones(5))  # from anybody
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 30, bias=False))
model(torch.ones(2, 30)).sum().backward()
group = dist.new_group([0, 1])
with torch.inference_mode():
    dist.broadcast(torch.ones(1), 0, group=group)
dist.destroy_process_group()
"""


def smdrun(folder: Path, script: str, *options: str, fork_ranks: bool = True) -> str:
    """Run a script with a timeline in the folder ``when``; what the command said.

    What a rank does before it makes a group by smddp, only its own interpreter records: it begins when torch
    is imported.
    """
    (folder / "train.py").write_text(script)
    command = [str(BIN / "smdrun"), *options, "--timeline", "when", "train.py"]
    done = job(command, cwd=folder, fork_ranks=fork_ranks, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return done.stderr


def spans(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Each rank's events of some length in the trace."""
    events = json.loads((folder / "when" / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    return {rank: [e for e in complete if e["pid"] == rank] for rank in {e["pid"] for e in complete}}


@pytest.mark.newest
def test_what_torchs_own_gloo_does_is_recorded_in_a_script_that_never_asks_for_smddp(tmp_path: Path) -> None:
    said = smdrun(tmp_path, GLOO, "-n", "2", fork_ranks=False)
    assert "kernel" not in said  # torch warns of operators whose kernels are replaced
    for events in spans(tmp_path).values():
        sizes = [(e["name"], e["args"]["bytes"]) for e in events if "bytes" in e["args"]]
        assert sizes.count(("all_reduce", 1024)) == 5
        for one in (("all_reduce", 4000), ("all_reduce", 3600), ("all_reduce", 12), ("barrier", 0)):
            assert sizes.count(one) == 1, one
        assert ("reduce_scatter_tensor", 8) in sizes and ("broadcast", 4) in sizes
    for rank, way in enumerate(("send to rank 1", "recv from rank 0")):
        messages = [e for e in spans(tmp_path)[rank] if e["name"][:4] in ("send", "recv")]
        assert list(map(name_and_bytes, messages)) == [(way, 12), (way, 20)]
    assert any(
        e["name"].startswith("waiting for rank") for events in spans(tmp_path).values() for e in events
    )


def with_bytes(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if "bytes" in event["args"]]


def name_and_bytes(event: dict[str, Any]) -> tuple[str, int]:
    return event["name"], event["args"]["bytes"]


PASSED_BY = """
import torch
import torch.distributed as dist
import opensmd

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
direct = opensmd.direct()
for _ in range(3):
    direct.all_reduce_(torch.ones(2))
direct.all_gather_into_(torch.empty(8), torch.ones(4))
torch.ops.opensmd.broadcast_(torch.ones(5), 0, dist.group.WORLD.group_name)
dist.all_reduce(torch.ones(1))

peer = 1 - dist.get_rank()
incoming = torch.empty(6)
batch = [dist.P2POp(dist.isend, torch.ones(6), peer), dist.P2POp(dist.irecv, incoming, peer)]
for request in dist.batch_isend_irecv(batch):
    request.wait()
assert incoming.tolist() == [1] * 6
mine = dist.irecv(torch.empty(7), peer, tag=1)
theirs = dist.isend(torch.ones(7), peer, tag=1)
dist.barrier()
del mine, theirs  # nobody has waited for either
dist.barrier()
own = dist.new_group(backend="smddp")  # which records such calls itself
opensmd.direct(own).all_reduce_(torch.ones(9))
"""


@pytest.mark.newest
def test_direct_calls_over_gloo_and_messages_in_batches_are_recorded(tmp_path: Path) -> None:
    smdrun(tmp_path, PASSED_BY, "-n", "2", fork_ranks=False)
    for rank, events in spans(tmp_path).items():
        found = [name_and_bytes(e) for e in with_bytes(events)]
        assert found.count(("all_reduce", 4)) == 2 and found.count(("all_reduce", 8)) == 3
        assert found.count(("all_gather_into_tensor", 32)) == 1 and found.count(("broadcast", 20)) == 1
        for size in (24, 28):
            assert found.count((f"send to rank {1 - rank}", size)) == 1
            assert found.count((f"recv from rank {1 - rank}", size)) == 1
        assert found.count(("all_reduce", 36)) == 1


FLOOD = """
import torch
import torch.distributed as dist
import opensmd
from opensmd.timeline.recorder import recorder

dist.init_process_group("smddp")
direct, value = opensmd.direct(), torch.ones(1)
recorder(dist.get_rank()).paused = True  # so that nobody empties the ring, which holds 65536 calls
for _ in range(70_000):
    direct.all_reduce_(value)
recorder(dist.get_rank()).paused = False
dist.destroy_process_group()
"""


@pytest.mark.parametrize("paused", [True, False], ids=["nobody looks", "as usual"])
def test_of_a_burst_longer_than_the_ring_all_is_recorded_or_counted(tmp_path: Path, paused: bool) -> None:
    smdrun(tmp_path, FLOOD.replace("True", str(paused)), "-n", "2")
    for events in spans(tmp_path).values():
        recorded = sum(e["name"] == "all_reduce" for e in events)
        lost = [int(e["name"].split()[0]) for e in events if e["name"].endswith("more, not recorded")]
        assert recorded >= 60_000 and recorded + sum(lost) == 70_000
        assert lost or not paused


KILLED = """
import os
import signal
import time
import torch
import torch.distributed as dist

dist.init_process_group("smddp")
for _ in range(10):
    dist.all_reduce(torch.ones(256))
own = os.path.join(os.environ["OPENSMD_TIMELINE"], f"rank-{dist.get_rank()}.events")
for _ in range(2):  # what the second look finds came after all of the above
    size = os.path.getsize(own)
    dist.barrier()
    while os.path.getsize(own) == size:
        time.sleep(0.05)
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def test_a_killed_rank_leaves_what_it_has_done(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    done = job([str(BIN / "smdrun"), "-n", "2", "--timeline", "when", "train.py"], cwd=tmp_path)
    assert done.returncode != 0
    for events in spans(tmp_path).values():
        assert [name_and_bytes(e) for e in with_bytes(events)].count(("all_reduce", 1024)) == 10


@pytest.mark.newest
def test_hosts_are_joined_in_one_trace_with_what_gloo_does_between_them(tmp_path: Path) -> None:
    script = GLOO.replace('"gloo")', '"smddp")').replace(
        "with torch", "dist.all_reduce(torch.ones(1))\nwith torch"
    )
    ssh = f"{sys.executable} -S {ROOT / 'tests' / 'support' / 'ssh.py'}"
    hosts = ["--hosts", "127.0.0.1:1,127.0.0.2:2", "--ssh", ssh, "--master-port", str(free_port())]
    script = script.replace("torch.ones(4))", "torch.ones(6))").replace("[2, 2]", "[3, 3]")
    script = script.replace("if rank == 0", "if rank == 2:\n    pass\nelif rank == 0")
    said = smdrun(tmp_path, script, *hosts)
    assert said.count("timeline: ") == 1
    found = spans(tmp_path)
    assert sorted(found) == [0, 1, 2]
    for events in found.values():
        assert [e["args"].get("bytes") for e in events if e["name"] == "all_reduce"].count(1024) == 5
        assert {"reduce_scatter_tensor", "barrier"} <= {e["name"] for e in events}
    # rank 0 is alone on its host; ranks 1 and 2 share theirs
    for rank, way in enumerate(("send to rank 1", "recv from rank 0")):
        assert {(way, 12), (way, 20)} <= set(map(name_and_bytes, with_bytes(found[rank])))
    assert sorted(path.name for path in (tmp_path / "when").iterdir()) == [
        "rank-0.events",
        "rank-1.events",
        "rank-2.events",
        "timeline.html",
        "trace.json",
    ]


def test_without_the_core_it_is_said_that_gloo_is_not_recorded(tmp_path: Path) -> None:
    script = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
    (tmp_path / "train.py").write_text(script)
    command = [str(BIN / "smdrun"), "-n", "1", "--timeline", "when", "train.py"]
    done = job(command, cwd=tmp_path, fork_ranks=False, OPENSMD_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert "the timeline will not show it" in done.stderr
    assert "no timeline: no rank has left events" in done.stderr

"""Model parallelism over two hosts: stages, smp's messages between ranks, and a rank that is killed."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

from benchmarks.hosts.networks import CABLE

from tests.support.forks import ForkedProcess
from tests.support.networks import started
from tests.support.patience import PATIENCE

TRAIN = """
import signal
from torch import nn
import smdistributed.modelparallel.torch as smp

def net():
    torch.manual_seed(0)
    parts = [part for _ in range(4) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(8, 3))

def batch(step):
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(step))

def plain():
    whole = net()
    sgd = torch.optim.SGD(whole.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        sgd.zero_grad()
        for rows in batch(step).chunk(16):
            loss = whole(rows).square().mean()
            (loss / 16).backward()
            losses.append(loss.item())
        sgd.step()
    return losses, whole.state_dict()

smp.init({"partitions": 4, "microbatches": 16})
model = smp.DistributedModel(net())
sgd = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@smp.step
def train(rows):
    loss = model(rows).square().mean()
    model.backward(loss)
    return loss
"""
EQUALS_PLAIN = """
losses, state = plain()
found = []
for step in range(3):
    sgd.zero_grad()
    found += [each.item() for each in train(batch(step)).outputs]
    sgd.step()
torch.testing.assert_close(found, losses)
assert len(list(model.local_parameters())) > 0  # a stage of its own on each rank, two on each host
for name, each in model.state_dict().items():
    torch.testing.assert_close(each, state[name], msg=name)

W, rank = smp.WORLD, smp.rank()
told = {"rank": rank, "tensor": torch.arange(3) + rank, "words": "x" * 100_000 * rank}
gathered = smp.allgather(told, W)
assert [each["rank"] for each in gathered] == [0, 1, 2, 3] and gathered[3]["words"] == "x" * 300_000
assert gathered[2]["tensor"].tolist() == [2, 3, 4]
for sender in (0, 3):  # to the own host and to the other
    if rank == sender:
        smp.broadcast(told, W)
    else:
        assert smp.recv_from(sender, smp.RankType.WORLD_RANK)["rank"] == sender
if rank == 0:
    smp.send({"lr": 0.5, "rows": torch.ones(2, 2)}, 3, smp.RankType.PP_RANK)
    assert smp.recv_from(3, smp.RankType.PP_RANK) == ["thanks"]
elif rank == 3:
    assert smp.recv_from(0, smp.RankType.PP_RANK)["rows"].sum() == 4
    smp.send(["thanks"], 0, smp.RankType.PP_RANK)
smp.barrier()
print("ok", rank, flush=True)
"""
KILLED_BEFORE_IT_SENDS = """
if rank == 3:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
with failing_together(3):
    smp.recv_from(3, smp.RankType.WORLD_RANK)
"""
KILLED_IN_A_STEP = """
train(batch(0))
smp.barrier()
print("ok", smp.rank(), flush=True)
if smp.rank() == 3:
    smp.DistributedModel.backward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with failing_together(3):
    train(batch(1))
"""


def errors_after_rank_3_is_killed(processes: list[ForkedProcess]) -> list[str]:
    """What the others of four ranks say at their ends, which is long before the timeout."""
    for rank, process in enumerate(processes):
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert f"ok {rank}\n" in lines, process.communicate(timeout=PATIENCE)[1]
    begin = time.monotonic()
    errors = [process.communicate(timeout=PATIENCE)[1] for process in processes[:3]]
    assert time.monotonic() - begin < PATIENCE / 2
    assert processes[3].wait() == -signal.SIGKILL
    return errors


def test_a_model_with_stages_on_two_hosts_trains_like_plain_torch_and_its_ranks_send_objects(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    """Then a rank is killed that the others wait for, and named on both hosts."""
    env = {"GLOO_SOCKET_IFNAME": CABLE}
    text = TRAIN + EQUALS_PLAIN + KILLED_BEFORE_IT_SENDS
    with started(hosts, tmp_path / "script.py", text, size=4, timeout=PATIENCE, env=env) as processes:
        for rank, error in enumerate(errors_after_rank_3_is_killed(processes)):
            assert re.search(rf"rank {rank} on \S+ in a receive from rank 3 on \S+ \(", error), error
            assert re.search(r"rank 3 on \S+ has died", error), error


def test_a_stage_on_another_host_that_is_killed_in_a_step_is_named_on_both(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    env = {"GLOO_SOCKET_IFNAME": CABLE}
    text = TRAIN + KILLED_IN_A_STEP
    with started(hosts, tmp_path / "script.py", text, size=4, timeout=PATIENCE, env=env) as processes:
        for error in errors_after_rank_3_is_killed(processes):
            assert re.search(r"the pipeline stopped: microbatch \d+ .*rank 3 on \S+ has died", error), error

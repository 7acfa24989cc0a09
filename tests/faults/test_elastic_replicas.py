"""A replica that is lost drops out, the others go on with the right average, and a new one joins from memory.

Two replicas of two stages. The losses of every step are compared with plain PyTorch's on the data of the
replicas that were there.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.elastic.elastic_job import ElasticJob
from opensmd.modelparallel.state import state
from tests.faults.elastic_replicas import require_undisturbed, run_killing
from tests.support.elastic_replicas import ReplicasOfTest, replicas_of
from tests.support.forked_jobs import start_job

STEPS, KILLED_IN, BATCH = 8, 3, 16
MANY = 10**6  # steps: they go on until a replica that starts has come, however long that takes
WHEN = ["before the step", "in the forward", "in the reduction", "after the step"]

Share = tuple[int, int]  # the data of a step that a replica has: its dp_rank and dp_size when the step begins
Record = tuple[int, Share, float]  # step, share, loss


def module() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)]
    return nn.Sequential(*layers)


def data_of(step: int, share: Share) -> tuple[Tensor, Tensor]:
    rank, size = share
    numbers = torch.Generator().manual_seed(step)
    rows, targets = torch.randn(BATCH, 6, generator=numbers), torch.randn(BATCH, 2, generator=numbers)
    return rows[rank::size], targets[rank::size]


def loss_of(found: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.mse_loss(found, wanted)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def begin(variables: dict[str, str], attempt: int, config: dict[str, Any]) -> None:
    """As a rank of the job."""
    os.environ.update(variables)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True, "elastic": {"timeout": 60}, **config})


def train(
    variables: dict[str, str],
    attempt: int,
    victim: int | None,
    when: str,
    killed_in: int,
    rejoins: bool,
    config: dict[str, Any],
) -> dict[str, Any]:
    """A script: trains until all steps are done, and where a replica rejoins so long."""
    begin(variables, attempt, config)
    model = smp.DistributedModel(module(), bucket_cap_mb=1e-5)
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    scheduler = scheduler_of(optimizer)
    is_victim = attempt == 0 and os.environ["RANK"] == str(victim)

    @smp.step
    def train_step(rows: Tensor, targets: Tensor) -> Tensor:
        if dies_now and when == "in the forward":
            die()
        loss = loss_of(model(rows), targets)
        model.backward(loss)
        return loss

    records: list[Record] = []
    together = 0
    for step in smp.elastic_steps(range(MANY if rejoins else STEPS), scheduler=scheduler):
        dies_now = is_victim and step == killed_in
        if dies_now and when == "before the step":
            die()
        if dies_now and when == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if dies_now and when == "in the reduction":
            # the last gradient of this rank, when the buckets of the others have left
            own = model.local_parameters() if model.partitioned else model.get_module().parameters()
            next(iter(own)).register_post_accumulate_grad_hook(lambda _: die())
        share = smp.dp_rank(), smp.dp_size()
        rows, targets = data_of(step, share)
        optimizer.zero_grad()
        loss = train_step(rows, targets).reduce_mean().item()
        if dies_now:
            die()
        optimizer.step()
        scheduler.step()
        records.append((step, share, loss))
        if rejoins and step > killed_in:
            together += smp.dp_size() == 2
            time.sleep(0.02 if smp.dp_size() == 1 else 0.0)
            if max(smp.allgather(together, smp.WORLD)) == STEPS:
                break
    weights = {name: each.detach() for name, each in model.local_named_parameters()}
    buffers = {name: each.detach().clone() for name, each in model.local_named_buffers()}
    smp.shutdown()
    return {"records": records, "weights": weights, "buffers": buffers, "rate": scheduler.get_last_lr()}


def expected(shares: dict[int, list[Share]]) -> dict[tuple[int, Share], float]:
    """The losses that plain PyTorch has on the data of the replicas that were there, by step and share."""
    model = module()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    found = {}
    for step in sorted(shares):
        optimizer.zero_grad()
        before, of_first = [each.clone() for each in model.buffers()], None
        for share in shares[step]:
            load_buffers(model, before)  # every step begins with those of the first replica
            batches = zip(*(each.chunk(2) for each in data_of(step, share)), strict=True)
            loss = torch.stack([loss_of(model(rows), targets) for rows, targets in batches]).mean()
            (loss / len(shares[step])).backward()
            found[step, share] = loss.item()
            of_first = of_first or [each.clone() for each in model.buffers()]
        assert of_first is not None
        load_buffers(model, of_first)
        optimizer.step()
        scheduler.step()
    return found


def load_buffers(model: nn.Module, numbers: list[Tensor]) -> None:
    for buffer, each in zip(model.buffers(), numbers, strict=True):
        buffer.copy_(each)


def compare(survivor: list[Record], *others: list[Record], lost_in: int) -> None:
    """The losses are plain PyTorch's on all that the replicas have had.

    Args:
        survivor: the records of a rank that was there all the time.
        others: of other ranks, of some steps.
        lost_in: the step that only the survivor's replica has ended.
    """
    shares: dict[int, list[Share]] = {}
    for step, (rank, size), _ in survivor:
        alone = step == lost_in or size == 1
        shares[step] = [(rank, size)] if alone else [(each, size) for each in range(size)]
    wanted = expected(shares)
    for step, share, loss in [*survivor, *itertools.chain(*others)]:
        assert loss == pytest.approx(wanted[step, share], abs=1e-5), (step, share)


def run_with_a_loss(
    job: ReplicasOfTest, victim: int, when: str, *, rejoins: bool, killed_in: int = KILLED_IN, **config: Any
) -> tuple[int, list[dict[str, Any]]]:
    """The number of the replica that was lost, and what the other's ranks have returned."""
    arguments = (train, victim, when, killed_in, rejoins, config)
    replicas = [job.start(number, *arguments) for number in range(2)]
    lost = victim // 2
    job.wait_for_end(replicas[lost])
    if not rejoins:
        return lost, job.values(replicas[1 - lost])
    joined = job.start(lost, *arguments)
    return lost, [*job.values(replicas[1 - lost]), *job.values(joined)]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("victim", [0, 3])
def test_a_replica_that_is_lost_drops_out_and_the_other_has_the_losses_of_its_own_data(
    victim: int, when: str
) -> None:
    with replicas_of(2, 2) as job:
        lost, answers = run_with_a_loss(job, victim, when, rejoins=False)
        lost_ranks = job.answers(next(iter(job.started(lost))))
    assert {answer.kind for answer in lost_ranks} <= {"died", "error"}
    one, other = (answer["records"] for answer in answers)
    # All ranks had ended the step, so it counts for all; the next one is done by those that are left.
    killed_in = KILLED_IN + (when == "after the step")
    assert [step for step, _, _ in one] == list(range(STEPS))
    assert [size for _, (_, size), _ in one] == [2] * (killed_in + 1) + [1] * (STEPS - killed_in - 1)
    compare(one, other, lost_in=killed_in)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_replica_joins_from_the_memory_of_another_and_all_are_equal_afterwards(victim: int) -> None:
    with replicas_of(2, 2) as job:
        _, answers = run_with_a_loss(job, victim, "in the reduction", rejoins=True)
    old, new = answers[:2], answers[2:]
    compare(old[0]["records"], *(answer["records"] for answer in answers), lost_in=KILLED_IN)
    begins = new[0]["records"][0][0]
    assert begins > KILLED_IN
    assert [step for step, *_ in old[0]["records"]] == list(range(begins + STEPS))
    assert [step for step, *_ in new[0]["records"]] == list(range(begins, begins + STEPS))
    for one, other in zip(old, new, strict=True):
        assert one["rate"] == other["rate"]
        assert one["weights"].keys() == other["weights"].keys() != set()
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name]), name


@pytest.mark.parametrize("when", ["before the step", "in the forward", "in the reduction"])
def test_a_replica_may_be_lost_in_the_step_that_places_the_model(when: str) -> None:
    with replicas_of(2, 2) as job:
        _, answers = run_with_a_loss(job, 2, when, rejoins=False, killed_in=0)
    one, other = (answer["records"] for answer in answers)
    assert [step for step, _, _ in one] == list(range(STEPS))
    compare(one, other, lost_in=0)


def test_a_replica_of_which_a_rank_is_stopped_drops_out_after_the_timeout() -> None:
    with replicas_of(2, 2) as job:
        config = {"elastic": {"timeout": 6}}
        replicas = [job.start(number, train, 3, "stopped", KILLED_IN, False, config) for number in range(2)]
        one, other = (answer["records"] for answer in job.values(replicas[0]))
        assert not job.store.has_ended(replicas[1])
    assert [size for _, (_, size), _ in one] == [2] * (KILLED_IN + 1) + [1] * (STEPS - KILLED_IN - 1)
    compare(one, other, lost_in=KILLED_IN)


def loop_with_a_lost_word(variables: dict[str, str], attempt: int) -> int:
    """Replica 2 dies and comes back; that it wants to join is told to replica 0 alone, and then to all."""
    begin(variables, attempt, {"partitions": 1})
    job = state.elastic
    assert isinstance(job, ElasticJob)
    if os.environ["RANK"] == "1":
        lose_first_request(job)
    for step in smp.elastic_steps(range(MANY)):
        if (os.environ["RANK"], attempt, step) == ("2", 0, KILLED_IN):
            die()
        smp.allgather(step, smp.WORLD)
        if step > KILLED_IN and smp.dp_size() == 3:
            break
    smp.shutdown()
    return job._agreement.generation


def lose_first_request(job: ElasticJob) -> None:
    agree = job._agree_on_end

    def agree_on_end() -> None:
        before = job._requested
        agree()
        if job._requested > before:
            job._requested, job._agree_on_end = before, agree  # type: ignore[method-assign]
            raise dist.DistBackendError("the word of the others got lost")

    job._agree_on_end = agree_on_end  # type: ignore[method-assign]


def test_a_request_to_join_that_not_all_have_heard_of_does_not_part_the_members_again_and_again() -> None:
    with replicas_of(3, 1) as job:
        replicas = [job.start(number, loop_with_a_lost_word) for number in range(3)]
        job.wait_for_end(replicas[2])
        joined = job.start(2, loop_with_a_lost_word)
        generations = [*job.values(replicas[0]), *job.values(replicas[1]), *job.values(joined)]
    # the first one, without replica 2, after the lost word, and with replica 2 again
    assert generations == [3, 3, 3]


def test_too_few_replicas_end_the_job_with_one_message() -> None:
    with replicas_of(2, 2) as job:
        arguments = (train, 3, "in the forward", KILLED_IN, False, {"elastic": {"min_replicas": 2}})
        replicas = [job.start(number, *arguments) for number in range(2)]
        answers = job.answers(replicas[0])
        said = job.store.over
    wanted = "1 of the at least 2 replicas are left that the setting elastic asks for (min_replicas)"
    assert said == wanted
    assert {(answer.kind, str(answer.value)) for answer in answers} == {("error", wanted)}


def steps_outside_of_the_loop(variables: dict[str, str], attempt: int) -> None:
    """A script that takes no replica in."""
    begin(variables, attempt, {})
    model = smp.DistributedModel(module())

    @smp.step
    def train_step(rows: Tensor) -> None:
        model.backward(model(rows).square().mean())

    for step in range(MANY):
        train_step(data_of(step, (0, 1))[0])
        if os.environ["RANK"] == "3" and step == KILLED_IN:
            die()
        if step > KILLED_IN:
            time.sleep(0.05)


def test_a_replica_that_comes_back_does_not_train_before_it_joins() -> None:
    with replicas_of(2, 2) as job:
        first = [job.start(number, steps_outside_of_the_loop) for number in range(2)]
        job.wait_for_end(first[1])
        answers = job.answers(job.start(1, steps_outside_of_the_loop))
    assert {answer.kind for answer in answers} == {"error"}
    for answer in answers:
        assert "called by a replica that has come back and not joined the others yet" in str(answer.value)


def test_nobody_joins_a_job_of_which_nothing_is_left() -> None:
    with replicas_of(1, 2) as job:
        arguments = (train, 1, "in the forward", KILLED_IN, False, {})
        job.wait_for_end(job.start(0, *arguments))
        answers = job.answers(job.start(0, *arguments))
    assert all(str(answer.value).startswith("no replica is left") for answer in answers), answers


def test_a_job_under_smdrun_goes_on_without_a_killed_replica_and_takes_it_in_again(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = run_killing(tmp_path, 1, random.Random(1), env, start=start_job)
    require_undisturbed(run, kills=1)

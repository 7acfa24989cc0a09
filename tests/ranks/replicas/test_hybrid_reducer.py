"""Data parallelism of a stage's local parameters: a hand-written microbatch loop against one process."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from opensmd.modelparallel.replicas.reducer import Replicas
from tests.support.ranks import RankPool

MICROBATCHES = 3
ROWS = 6


class Stage(nn.Module):
    """A model of which only ``mine`` and the root's own scale live here; ``other`` is on another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.mine = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))
        self.sometimes = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.other = nn.Linear(1000, 1000)

    def forward(self, x: Tensor, *, extra: bool = False) -> Tensor:
        out: Tensor = self.mine(self.frozen(x) * self.scale)
        return self.sometimes(out) if extra else out


def is_local(name: str) -> bool:
    return not name.startswith("other.")


def build(seed: int) -> Stage:
    torch.manual_seed(seed)
    return Stage().eval()  # batch statistics of a microbatch are no data parallel matter


def data(step: int, replica: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return list(torch.randn(MICROBATCHES, ROWS, 5, generator=generator))


@dataclass
class Case:
    """Arguments of Replicas, and whether a replica's microbatch uses the optional layer."""

    arguments: dict[str, Any] = field(default_factory=dict)
    extra: Callable[[int, int], bool] = lambda replica, microbatch: True
    steps: int = 3


def even_replicas_only(replica: int, microbatch: int) -> bool:
    return replica % 2 == 0


def never(replica: int, microbatch: int) -> bool:
    return False


def first_microbatch_only(replica: int, microbatch: int) -> bool:
    return microbatch == 0


def first_microbatch_of_the_first_replica(replica: int, microbatch: int) -> bool:
    return microbatch == replica == 0


CASES = {
    "plain": Case(),
    "tiny buckets": Case({"bucket_cap_mb": 0.0001}),
    "bucket views": Case({"gradient_as_bucket_view": True}),
    "no overlap": Case({"overlapping_allreduce": False}),
    "no overlap, tiny buckets": Case({"overlapping_allreduce": False, "bucket_cap_mb": 0.0001}),
    "unused on some replicas": Case({"find_unused_parameters": True}, extra=even_replicas_only),
    "unused everywhere": Case({"find_unused_parameters": True}, extra=never),
    "unused in the last microbatch": Case({"find_unused_parameters": True}, extra=first_microbatch_only),
    "used once": Case({"find_unused_parameters": True}, extra=first_microbatch_of_the_first_replica),
    "no overlap, used once": Case(
        {"overlapping_allreduce": False}, extra=first_microbatch_of_the_first_replica
    ),
    "no overlap, unused on some": Case({"overlapping_allreduce": False}, extra=even_replicas_only),
    "no overlap, unused everywhere": Case({"overlapping_allreduce": False}, extra=never),
    "two passes a step": Case({"backward_passes_per_step": 2}, steps=4),
    "no overlap, two passes": Case({"backward_passes_per_step": 2, "overlapping_allreduce": False}, steps=4),
}


def run_step(model: Stage, replicas: Replicas, case: Case, step: int) -> None:
    rank = dist.get_rank()
    replicas.before_step()
    for microbatch, x in enumerate(data(step, rank)):
        loss = model(x, extra=case.extra(rank, microbatch)).square().mean() / MICROBATCHES
        if microbatch == MICROBATCHES - 1:
            replicas.before_last_backward([loss])
        loss.backward()
    replicas.after_step(backward_ran=True)


def expected(case: Case, world: int, steps: list[int]) -> dict[str, Tensor | None]:
    """Gradients of one process that sees all replicas' microbatches of these steps."""
    model = build(0)
    for step in steps:
        for replica in range(world):
            for microbatch, x in enumerate(data(step, replica)):
                loss = model(x, extra=case.extra(replica, microbatch)).square().mean()
                (loss / (MICROBATCHES * world)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_gradients(model: Stage, wanted: dict[str, Tensor | None], name: str) -> None:
    for key, parameter in model.named_parameters():
        reference = wanted[key]
        assert (parameter.grad is None) == (reference is None), (name, key)
        if parameter.grad is not None and reference is not None:
            torch.testing.assert_close(parameter.grad, reference, rtol=1e-5, atol=1e-7, msg=f"{name} {key}")


def all_cases() -> None:
    world = dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    for name, case in CASES.items():
        model = build(dist.get_rank())  # every replica starts elsewhere; the first one's values win
        replicas = Replicas(model, is_local=is_local, group=group, **case.arguments)
        reference = build(0)
        for key, value in reference.state_dict().items():
            if is_local(key):
                torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0)
        passes = case.arguments.get("backward_passes_per_step", 1)
        for step in range(case.steps):
            run_step(model, replicas, case, step)
            if (step + 1) % passes == 0:
                check_gradients(model, expected(case, world, list(range(step + 1 - passes, step + 1))), name)
                model.zero_grad()
        assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")


def microbatches_may_run_in_threads() -> None:
    """As the engine does it: a thread a microbatch, all forwards first, the last one arms the reducer."""
    group = dist.group.WORLD
    assert group is not None
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(0)
    replicas = Replicas(model, is_local=is_local, group=group, find_unused_parameters=True)
    for step in range(3):
        turns = [threading.Event() for _ in range(2 * MICROBATCHES + 1)]

        def run(microbatch: int, step: int = step, turns: list[threading.Event] = turns) -> None:
            turns[microbatch].wait()
            loss = model(data(step, rank)[microbatch], extra=True).square().mean() / MICROBATCHES
            turns[microbatch + 1].set()
            turns[MICROBATCHES + microbatch].wait()
            if microbatch == MICROBATCHES - 1:
                replicas.before_last_backward([loss])
            loss.backward()
            turns[MICROBATCHES + microbatch + 1].set()

        replicas.before_step()
        threads = [threading.Thread(target=run, args=(index,)) for index in range(MICROBATCHES)]
        for thread in threads:
            thread.start()
        turns[0].set()
        for thread in threads:
            thread.join()
        replicas.after_step(backward_ran=True)
        check_gradients(model, expected(Case(), world, [step]), "threads")
        model.zero_grad()


def gradients_stay_local_before_the_last_backward() -> None:
    group = dist.group.WORLD
    assert group is not None
    model = build(0)
    replicas = Replicas(model, is_local=is_local, group=group)
    alone = copy.deepcopy(model)
    replicas.before_step()
    for x in data(0, dist.get_rank())[:-1]:
        model(x, extra=True).sum().backward()
        alone(x, extra=True).sum().backward()
    check_gradients(model, {name: p.grad for name, p in alone.named_parameters()}, "local")


def buffers_follow_the_first_replica() -> None:
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    for follow, passes in itertools.product((True, False), (1, 2)):
        model = build(0)
        options = {"broadcast_buffers": follow, "backward_passes_per_step": passes}
        replicas = Replicas(model, is_local=is_local, group=group, **options)
        for step in range(3):
            model.mine[1].running_mean = torch.full((7,), float(rank + 1))  # a replaced buffer counts too
            run_step(model, replicas, Case(), step)
            wanted = 1.0 if follow else float(rank + 1)
            assert float(model.mine[1].running_mean[0]) == wanted, (follow, passes, step)


def a_stage_without_parameters_has_nothing_to_do() -> None:
    group = dist.group.WORLD
    assert group is not None
    model = build(dist.get_rank())
    replicas = Replicas(model, is_local=lambda name: False, group=group)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with replicas.join():
        replicas.before_step()
        replicas.before_last_backward([])
        replicas.after_step(backward_ran=True)
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old, rtol=0, atol=0)


def uneven_numbers_of_steps() -> None:
    group = dist.group.WORLD
    assert group is not None
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(0)
    replicas = Replicas(model, is_local=is_local, group=group)
    steps = 2 + rank
    with replicas.join():
        for step in range(steps):
            model.zero_grad()
            run_step(model, replicas, Case(), step)
    if rank == world - 1:  # it was alone in the last step
        reference = build(0)
        for x in data(steps - 1, rank):
            (reference(x, extra=True).square().mean() / MICROBATCHES / world).backward()
        check_gradients(model, {name: p.grad for name, p in reference.named_parameters()}, "join")


def comm_hooks_replace_the_reduction() -> None:
    group = dist.group.WORLD
    assert group is not None
    world = dist.get_world_size()
    model = build(0)
    replicas = Replicas(
        model, is_local=is_local, group=group, comm_hooks=[(group, default_hooks.allreduce_hook)]
    )
    for step in range(2):
        run_step(model, replicas, Case(), step)
        check_gradients(model, expected(Case(), world, [step]), "hook")
        model.zero_grad()
    with contextlib.suppress(ValueError):
        Replicas(
            model,
            is_local=is_local,
            group=group,
            overlapping_allreduce=False,
            comm_hooks=[(group, default_hooks.allreduce_hook)],
        )
        raise AssertionError("a hook without buckets was taken")


def sum_in_two_calls(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that adds up the second half of a bucket when the first is done, as torch's PowerSGD does."""
    gradients = bucket.buffer().div_(group.size())
    first, second = gradients.tensor_split(2)

    def add_up_second(_: torch.futures.Future[Any]) -> Tensor:
        dist.all_reduce(second, group=group, async_op=True).get_future().wait()
        return gradients

    return dist.all_reduce(first, group=group, async_op=True).get_future().then(add_up_second)


sum_in_two_calls.__annotations__.clear()  # torch compares them with its own types


def comm_hooks_may_call_collectives_in_callbacks() -> None:
    """Whichever bucket is quicker, if the group is smddp's."""
    group = dist.group.WORLD
    assert group is not None
    if dist.get_backend() != "smddp":
        return
    model = build(0)
    hooks = [(group, sum_in_two_calls)]
    replicas = Replicas(model, is_local=is_local, group=group, bucket_cap_mb=0.0001, comm_hooks=hooks)
    for step in range(10):
        run_step(model, replicas, Case(), step)
        check_gradients(model, expected(Case(), dist.get_world_size(), [step]), "hook with callbacks")
        model.zero_grad()


class Stop(Exception):
    """What a failing step raises."""


def stop(grad: Tensor) -> None:
    raise Stop


def stop_in_backward(module: nn.Module, inputs: Any, out: Tensor) -> None:
    """A forward hook that lets the backward stop when it comes to ``module``."""
    out.register_hook(stop)  # type: ignore[no-untyped-call]


def failing_step(model: Stage, replicas: Replicas, where: str) -> None:
    """A step that ends with an exception at some point, the same on all replicas."""
    replicas.before_step()
    for microbatch, x in enumerate(data(0, dist.get_rank())):
        last = microbatch == MICROBATCHES - 1
        hook = model.mine.register_forward_hook(stop_in_backward) if last and where == "backward" else None
        loss = model(x, extra=True).square().mean() / MICROBATCHES
        if hook is not None:
            hook.remove()
        if where == "forward":
            raise Stop
        if last:
            replicas.before_last_backward([loss])
            if where == "armed":
                raise Stop
        loss.backward()
    replicas.after_backward()
    raise Stop


def a_step_that_failed_leaves_nothing_behind() -> None:
    group = dist.group.WORLD
    assert group is not None
    world = dist.get_world_size()
    for options in (
        {},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
        {"find_unused_parameters": True},
    ):
        for where in ("forward", "armed", "backward", "afterwards"):
            model = build(0)
            replicas = Replicas(model, is_local=is_local, group=group, **options)
            replicas.register_comm_hook(group, default_hooks.allreduce_hook)
            for step in range(4):
                if step % 2 == 1:
                    with contextlib.suppress(Stop):
                        failing_step(model, replicas, where)
                    replicas.abandon_step()
                    model.zero_grad()
                run_step(model, replicas, Case(), step)
                check_gradients(model, expected(Case(), world, [step]), f"{options} {where} {step}")
                model.zero_grad()


def a_last_microbatch_without_backward_is_no_silent_loss() -> None:
    group = dist.group.WORLD
    assert group is not None
    model = build(0)
    replicas = Replicas(model, is_local=is_local, group=group)
    run_step(model, replicas, Case(), 0)
    replicas.before_step()
    model(data(1, dist.get_rank())[0], extra=True).sum().backward()
    with pytest.raises(RuntimeError, match="were not averaged over the replicas"):
        replicas.after_step(backward_ran=True)


def a_parameter_that_the_last_backward_does_not_reach_is_named() -> None:
    group = dist.group.WORLD
    assert group is not None
    replicas = Replicas(model := build(0), is_local=is_local, group=group)
    with pytest.raises(
        RuntimeError, match=r"2 have no gradient: sometimes\.weight, .*find_unused_parameters"
    ):
        run_step(model, replicas, Case(extra=never), 0)


FUNCTIONS = [
    all_cases,
    microbatches_may_run_in_threads,
    gradients_stay_local_before_the_last_backward,
    buffers_follow_the_first_replica,
    a_stage_without_parameters_has_nothing_to_do,
    uneven_numbers_of_steps,
    comm_hooks_replace_the_reduction,
    comm_hooks_may_call_collectives_in_callbacks,
    a_step_that_failed_leaves_nothing_behind,
    a_last_microbatch_without_backward_is_no_silent_loss,
    a_parameter_that_the_last_backward_does_not_reach_is_named,
]


def everything() -> None:
    for function in FUNCTIONS:
        function()


@pytest.mark.parametrize("backend", ["gloo", "smddp"])
def test_gradients_of_replicas_equal_those_of_one_process_in_every_mode(
    pool: Callable[[int], RankPool], backend: str
) -> None:
    pool(2).run(everything, backend=backend)

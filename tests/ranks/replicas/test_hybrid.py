"""Replicas through the public interface, whole or split over two stages, train like one process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.init import shutdown
from opensmd.modelparallel.replicas.comm_hook import CommHook
from tests.support.ranks import RankPool, run_once

ROWS, WIDTH, STEPS = 8, 12, 4  # rows of one replica's batch


class Net(nn.Module):
    """Layers to cut, a buffer, and a parameter of the root."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x + self.shift)
        return out


@dataclass
class Case:
    """Settings of ``smp.init`` and of ``smp.DistributedModel``."""

    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    passes: int = 1
    microbatches: int = 4
    hook: CommHook | None = None
    frozen: tuple[str, ...] = ()  # for each step, the beginning of the names that do not train in it
    evaluated: bool = False  # in inference mode, in the first step of all


# torch compares annotations, which are texts in this file
def hook_of_a_script(group, bucket):  # type: ignore[no-untyped-def]
    """As SageMaker's library asks for: it averages over replicas and microbatches."""
    summed = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert summed is not None
    share = group.size() * smp.state.cfg.microbatches
    return summed.get_future().then(lambda future: future.value()[0].div_(share))  # type: ignore[no-any-return]


FREEZING = ("layers.0", "none", "layers", "head")
CASES: dict[str, Case] = {
    "cluster": Case(),
    "spread": Case({"placement_strategy": "spread"}),
    "PDT": Case({"placement_strategy": "PDT"}),
    "simple schedule": Case({"pipeline": "simple"}),
    "fixed order": Case({"deterministic_server": True}),
    "one microbatch": Case(microbatches=1),
    "eight microbatches": Case(microbatches=8),
    "bucket views, tiny buckets": Case(model={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
    "no overlap": Case(model={"overlapping_allreduce": False}),
    "two passes": Case(model={"backward_passes_per_step": 2}, passes=2),
    "sums over microbatches": Case(model={"average_grads_across_microbatches": False}),
    "a script's hook": Case(hook=hook_of_a_script),
    "a script's hook, bucket views, two passes": Case(
        model={"gradient_as_bucket_view": True, "backward_passes_per_step": 2},
        passes=2,
        hook=hook_of_a_script,
    ),
    "torch's hook": Case(hook=default_hooks.allreduce_hook),
    "unused allowed": Case(model={"find_unused_parameters": True}),
    "evaluated first": Case(evaluated=True),
    "no broadcast of buffers": Case(model={"broadcast_buffers": False}),
    "other layers frozen in every step": Case(frozen=FREEZING),
    "no overlap, freezing": Case(model={"overlapping_allreduce": False}, frozen=FREEZING),
    "bucket views, freezing": Case(model={"gradient_as_bucket_view": True}, frozen=FREEZING),
    "two passes, freezing": Case(model={"backward_passes_per_step": 2}, passes=2, frozen=FREEZING),
    "two passes, no overlap, freezing": Case(
        model={"backward_passes_per_step": 2, "overlapping_allreduce": False}, passes=2, frozen=FREEZING
    ),
    "two passes, unused allowed, freezing": Case(
        model={"backward_passes_per_step": 2, "find_unused_parameters": True}, passes=2, frozen=FREEZING
    ),
}


def data(step: int, replicas: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(replicas * ROWS, WIDTH, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def freeze(model: nn.Module, case: Case, step: int) -> None:
    for name, parameter in model.named_parameters() if case.frozen else ():
        parameter.requires_grad_(not name.removeprefix("module.").startswith(case.frozen[step]))


def one_process(case: Case, replicas: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final parameters of plain PyTorch on the whole batches."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    summed = case.model.get("average_grads_across_microbatches") is False
    losses = []
    for step in range(STEPS):
        freeze(model, case, step)
        x, y = data(step, replicas)
        loss = F.mse_loss(model(x), y)
        torch.autograd.backward(loss * (case.microbatches if summed else 1))
        losses.append(loss.item())
        if (step + 1) % case.passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def train(case: Case, partitions: int) -> tuple[list[float], dict[str, Tensor]]:
    """This rank's replica's losses, averaged over replicas, and this rank's parameters."""
    smp.init({"partitions": partitions, "microbatches": case.microbatches, "ddp": True, **case.config})
    torch.manual_seed(smp.dp_rank())  # replicas begin differently; the first one's values must win
    model = smp.DistributedModel(Net(), **case.model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))

    @smp.step
    def step_function(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    if case.hook is not None:
        model.register_comm_hook(smp.get_dp_process_group(), case.hook)
    if case.evaluated:
        with torch.inference_mode():
            smp.step(lambda x: model(x))(torch.ones(ROWS, WIDTH))
    losses = []
    for step in range(STEPS):
        freeze(model, case, step)
        x, y = data(step, smp.dp_size())
        mine = slice(smp.dp_rank() * ROWS, (smp.dp_rank() + 1) * ROWS)
        loss = step_function(x[mine], y[mine]).reduce_mean()
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        losses.append(loss.item() / smp.dp_size())
        if (step + 1) % case.passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in model.local_named_parameters()}


def every_case(partitions: int) -> list[str]:
    """The names of this rank's parameters in the last case."""
    local: dict[str, Tensor] = {}
    for name, case in CASES.items():
        losses, local = train(case, partitions)
        replicas = smp.dp_size()
        shutdown()
        wanted_losses, wanted = one_process(case, replicas)
        torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=1e-7, msg=f"{name}: losses")
        for key, value in local.items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
    return list(local)


EVERYTHING = sorted(name for name, _ in Net().named_parameters())


def test_two_replicas_train_like_one_process(pool: Callable[[int], RankPool]) -> None:
    for names in pool(2).run(every_case, 1):
        assert sorted(names) == EVERYTHING


def test_two_replicas_of_two_stages_train_like_one_process(pool: Callable[[int], RankPool]) -> None:
    first, second, *others = pool(4).run(every_case, 2)
    assert first and second and sorted([*first, *second]) == EVERYTHING
    assert others == [first, second]


def uneven_steps(partitions: int, microbatches: int, backwards: int) -> int:
    smp.init({"partitions": partitions, "microbatches": microbatches, "ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(Net())

    @smp.step
    def step_function(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(backwards):
            loss = F.mse_loss(model(x), y)
            model.backward(loss)
        return loss

    step_function(*data(0, 1))  # the replicas meet in the first step
    steps = 2 + smp.dp_rank()
    with model.join():
        for step in range(steps):
            step_function(*data(step, 1))
    shutdown()
    return steps


@pytest.mark.parametrize(("partitions", "steps"), [(1, [2, 3]), (2, [2, 2, 3, 3])])
@pytest.mark.parametrize(("microbatches", "backwards"), [(2, 1), (1, 2)])
def test_replicas_with_different_numbers_of_steps_end_together_under_join(
    pool: Callable[[int], RankPool], partitions: int, steps: list[int], microbatches: int, backwards: int
) -> None:
    assert pool(len(steps)).run(uneven_steps, partitions, microbatches, backwards) == steps


def more_backwards_in_the_last_microbatch() -> list[Tensor]:
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(Net())

    @smp.step
    def step_function(x: Tensor, y: Tensor, backwards: Tensor) -> None:
        for _ in range(int(backwards)):
            model.backward(F.mse_loss(model(x), y))

    x, y = data(smp.dp_rank(), 1)
    step_function(x, y, torch.tensor([1, 2]))
    gradients = [
        parameter.grad.clone() for parameter in model.local_parameters() if parameter.grad is not None
    ]
    shutdown()
    return gradients


def test_replicas_average_also_what_only_the_last_microbatch_adds(pool: Callable[[int], RankPool]) -> None:
    first, second, *others = pool(4).run(more_backwards_in_the_last_microbatch)
    assert first and second
    for mine, other in zip([first, second], others, strict=True):
        assert all(map(torch.equal, mine, other))


def frozen_inside_a_step() -> str:
    """What freezing a parameter inside a step of one microbatch says where there are replicas."""
    smp.init({"partitions": 2, "microbatches": 1, "ddp": True})
    torch.manual_seed(0)
    module = Net()
    model = smp.DistributedModel(module)

    @smp.step
    def step_function(x: Tensor, y: Tensor) -> None:
        next(module.parameters()).requires_grad_(requires_grad=False)
        model.backward(F.mse_loss(model(x), y))

    with pytest.raises(RuntimeError) as error:
        step_function(*data(0, 1))
    return str(error.value)


def test_replicas_refuse_to_freeze_parameters_inside_a_step() -> None:
    for outcome in run_once(4, frozen_inside_a_step):
        assert "replicas reduce what one backward finds" in str(outcome.value), outcome.text


def other_replicas(partitions: int, other: str) -> str:
    """What a step says if the replicas have frozen different parameters, or have different models."""
    smp.init({"partitions": partitions, "microbatches": 2, "ddp": True})
    torch.manual_seed(0)
    modules = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    if other == "model" and smp.dp_rank() == 1:
        modules.append(nn.Linear(WIDTH, WIDTH))
    model = smp.DistributedModel(nn.Sequential(*modules))

    @smp.step
    def step_function(x: Tensor) -> None:
        model.backward(model(x).mean())

    if other == "later":
        step_function(torch.ones(4, WIDTH))
    if other != "model" and (partitions == 1 or smp.dp_rank() == 1):
        list(model.module.children())[smp.dp_rank()].requires_grad_(requires_grad=False)
    with pytest.raises(SMPError) as error:
        step_function(torch.ones(4, WIDTH))
    shutdown()
    return str(error.value)


@pytest.mark.parametrize("other", ["frozen", "later", "model"])
@pytest.mark.parametrize("partitions", [1, 2])
def test_all_ranks_learn_what_replicas_do_not_have_in_common(
    pool: Callable[[int], RankPool], partitions: int, other: str
) -> None:
    # Both layers have the same shape: the gradient of one would be averaged with that of the other.
    wanted = r"requires_grad of parameter '.*' .*is (True|False) on ranks? .* and (True|False) on rank"
    if other == "model":
        wanted = "different models: rank 0 has no further parameter where rank . has 2.weight"
    for text in pool(2 * partitions).run(other_replicas, partitions, other):
        assert re.search(wanted, text), text


def fail_after_the_last_backward(microbatches: int) -> None:
    """One replica's step function raises when its gradients have been reduced; both train on."""
    shutdown()
    smp.init({"microbatches": microbatches, "ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(Net(), bucket_cap_mb=0.0001)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    calls = 0

    @smp.step
    def step_function(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        if smp.dp_rank() == 1 and calls == 2 * microbatches:
            raise LookupError("no such metric")
        return loss

    for step in range(STEPS):
        mine = slice(smp.dp_rank() * ROWS, (smp.dp_rank() + 1) * ROWS)
        x, y = data(step, 2)
        with contextlib.suppress(LookupError):
            step_function(x[mine], y[mine])
        optimizer.step()
        optimizer.zero_grad()
    parameters = dict(model.get_module().named_parameters())
    shutdown()
    for name, wanted in one_process(Case(), 2)[1].items():
        torch.testing.assert_close(parameters[name].detach(), wanted, rtol=1e-5, atol=1e-6, msg=name)


def test_a_step_that_fails_on_one_replica_after_its_last_backward_leaves_the_replicas_in_step(
    pool: Callable[[int], RankPool],
) -> None:
    for microbatches in (1, 4):
        pool(2).run(fail_after_the_last_backward, microbatches)

"""Does a model with distributed modules train as the plain one? Both are trained, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.partitioned import restart

__all__ = ["ROWS", "STEPS", "Training", "plain_training", "require_equal", "shared_training"]

ROWS, STEPS, RATE = 8, 2, 0.1  # rows of the whole job's batch
LIMIT = 0.5  # of the gradients' norm

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of a model and a batch


@dataclass
class Training:
    """What a training left behind, the same on every rank.

    Attributes:
        losses: the mean over the job, of every step.
        norms: of the gradients before clipping.
        state: the model's whole state dict.
        optimizer: the optimizer's whole state.
    """

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    optimizer: dict[str, Any]


def batch(words: int, vocabulary: int, step: int) -> tuple[Tensor, Tensor]:
    """Ids and a mask (1 is seen) whose last words are masked in some rows."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(vocabulary, (ROWS, words), generator=generator)
    mask = torch.ones(ROWS, words, dtype=torch.long)
    mask[1::2, -2:] = 0
    return ids, mask


def plain_training(model: nn.Module, loss: Loss, words: int, vocabulary: int) -> Training:
    """Plain PyTorch on the whole batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        value = loss(model, *batch(words, vocabulary, step))
        optimizer.zero_grad()
        torch.autograd.backward(value)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
        losses.append(value.item())
    return Training(losses, norms, model.state_dict(), optimizer.state_dict())


def shared_training(
    make: Callable[[], nn.Module],
    loss: Loss,
    words: int,
    vocabulary: int,
    *,
    config: dict[str, Any],
    place: Callable[[nn.Module], None] | None = None,
    torch_clips: bool = False,
) -> tuple[Training, Any]:
    """The same with ``smp``: the model that ``make`` creates under ``smp.tensor_parallelism``.

    Args:
        place: puts its modules on partitions.
        torch_clips: clip by torch's function, which is for one partition, rather than the optimizer's.
    """
    restart(ddp=True, **config)
    with smp.tensor_parallelism():
        module = make()
    model = smp.DistributedModel(module)
    if place is not None:
        place(model.get_module())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))

    @smp.step
    def step_function(ids: Tensor, mask: Tensor) -> Tensor:
        value = loss(model, ids, mask)
        model.backward(value)
        return value

    losses, norms = [], []
    for step in range(STEPS):
        ids, mask = (own_rows(tensor) for tensor in batch(words, vocabulary, step))
        optimizer.zero_grad()
        value = step_function(ids, mask).reduce_mean()
        norms.append(
            float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
            if torch_clips
            else optimizer.clip_master_grads(LIMIT)
        )
        optimizer.step()
        dist.all_reduce(value, group=smp.get_dp_process_group())
        losses.append(value.item() / smp.dp_size())
    return Training(losses, norms, model.state_dict(), optimizer.state_dict()), model


def own_rows(whole: Tensor) -> Tensor:
    """This rank's part of the job's batch."""
    if smp.state.cfg.prescaled_batch:
        return whole.chunk(smp.rdp_size())[smp.rdp_rank()]
    return whole.chunk(smp.dp_size())[smp.dp_rank()]


def require_equal(
    found: Training,
    wanted: Training,
    *,
    translate: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> None:
    """Losses, norms and parameters agree within 1e-6, relative to each tensor's largest entry."""
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.norms, wanted.norms, rtol=2e-6, atol=0.0)
    state = translate(found.state)
    missing = sorted(wanted.state.keys() - state.keys())
    assert not missing, missing
    for name, value in wanted.state.items():
        margin = 1e-6 * float(value.abs().max()) + 1e-7
        torch.testing.assert_close(
            state[name], value, rtol=0.0, atol=margin, msg=lambda text, name=name: f"{name}: {text}"
        )

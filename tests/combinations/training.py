"""One training, in one process and shared out: losses, norms, gradients and parameters by their plain names.

The first gradients, after clipping, are what SGD's momentum begins with, and the optimizer's state dict is
whole at all degrees. In 16 bits the one process trains as torch's documentation shows it: a model of 16 bits
whose gradients go to FP32 masters, which are rounded into the model again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.combinations.models import MODELS
from tests.combinations.ways import Degrees
from tests.support.equality import one_thread
from tests.support.partitioned import restart

__all__ = ["STEPS", "Job", "Trained", "alone", "shared_out"]

STEPS, RATE, CLIP, MICROBATCHES, SCALE = 3, 0.05, 0.5, 2, 128.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Trained:
    """What a training left behind.

    Attributes:
        losses: of the whole batch, for each step.
        norms: of the gradients before clipping, for each step.
        gradients: of the first step after clipping, by the parameter's name in the plain model.
        parameters: after the last step, with all bits of the masters if there are some.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def made(name: str) -> nn.Module:
    """The plain model, always with the same values."""
    torch.manual_seed(5)
    return MODELS[name].make()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def _converting(model: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """The model, given its precision's numbers."""

    def call(*args: Tensor, **options: Tensor) -> Any:
        return model(*(each.to(dtype) for each in args), **options)

    return call


@functools.cache
def alone(name: str, precision: str) -> Trained:
    """Plain PyTorch in one process, a microbatch at a time, with sums made as on the ranks."""
    with one_thread():
        return _alone(name, precision)


def _alone(name: str, precision: str) -> Trained:
    kind, dtype = MODELS[name], DTYPES[precision]
    scale = SCALE if precision == "fp16" else 1.0
    model = made(name).to(dtype)
    pairs = dict(model.named_parameters())
    masters = {key: nn.Parameter(each.detach().float()) for key, each in pairs.items()}
    optimizer = _sgd(masters.values())
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        losses.append(0.0)
        for rows in kind.batch(step).chunk(MICROBATCHES):
            loss = kind.loss(_converting(model, dtype), rows)
            (loss * (scale / MICROBATCHES)).backward()
            losses[-1] += loss.item() / MICROBATCHES
        for key, parameter in pairs.items():
            masters[key].grad = parameter.grad.float() / scale
            parameter.grad = None
        norms.append(float(nn.utils.clip_grad_norm_(masters.values(), CLIP)))
        gradients = gradients or {key: each.grad.clone() for key, each in masters.items()}
        optimizer.step()
        with torch.no_grad():
            for key, parameter in pairs.items():
                parameter.copy_(masters[key])
    return Trained(losses, norms, gradients, {key: each.detach() for key, each in masters.items()})


def shared_out(name: str, precision: str, degrees: Degrees) -> Trained:
    """The same with ``smp``, on all ranks of a job; every rank has the whole result."""
    job = Job(name, precision, degrees)
    job.train(range(1))
    gradients = _of_optimizer(job.model, job.optimizer, "momentum_buffer")
    job.train(range(1, STEPS))
    return Trained(job.losses, job.norms, gradients, job.parameters())


class Job:
    """A script that trains with ``smp``.

    Attributes:
        losses, norms: of the steps so far.
    """

    def __init__(self, name: str, precision: str, degrees: Degrees) -> None:
        self.kind, self.precision = MODELS[name], precision
        restart(**_settings(precision, degrees, by_block=self.kind.by_block))
        with smp.tensor_parallelism(enabled=degrees.tensor > 1):
            module = made(name)
        self.model = smp.DistributedModel(module)
        scale = {"static_loss_scale": SCALE} if precision == "fp16" else {}
        self.optimizer = smp.DistributedOptimizer(_sgd(self.model.parameters()), **scale)
        self.losses: list[float] = []
        self.norms: list[float] = []

        @smp.step
        def step_function(rows: Tensor) -> Tensor:
            loss = self.kind.loss(self.model, rows)
            self.model.backward(loss)
            return loss

        self._step_function = step_function

    def train(self, steps: range) -> None:
        """Steps with these numbers."""
        for step in steps:
            self.optimizer.zero_grad()
            mine = self.kind.batch(step).chunk(smp.dp_size())[smp.dp_rank()]
            loss = self._step_function(mine).reduce_mean()
            dist.all_reduce(loss, group=smp.get_dp_process_group())
            self.losses.append(loss.item() / smp.dp_size())
            self.norms.append(self.optimizer.clip_master_grads(CLIP))
            self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        """Whole, with all bits of the masters if there are some; called on all ranks."""
        if self.precision != "fp32":
            return _of_optimizer(self.model, self.optimizer, "master_weight")
        return _plain_names(self.model.state_dict())


def _settings(precision: str, degrees: Degrees, *, by_block: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "partitions": degrees.stages,
        "tensor_parallel_degree": degrees.tensor,
        "sharded_data_parallel_degree": degrees.sharded,
        "microbatches": MICROBATCHES,
        "ddp": True,
    }
    if degrees.sharded > 1:
        settings["sdp_gradient_clipping"] = 0.0
        if by_block:
            settings |= {"sdp_param_persistence_threshold": 0, "sdp_max_live_parameters": 1}
    return settings | ({precision: True} if precision != "fp32" else {})


def _of_optimizer(model: Any, optimizer: Any, key: str) -> dict[str, Tensor]:
    """Entries of the whole optimizer's state by the plain names of their parameters."""
    entries = optimizer.state_dict()["state"]
    module = model.get_module()
    numbers = {id(parameter): number for number, parameter in enumerate(module.parameters())}
    named = module.named_parameters(remove_duplicate=False)
    return _plain_names({name: entries[numbers[id(each)]][key].clone() for name, each in named})


def _plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    translations = smp.state.module_manager.translate_functions
    return translations[0][0](dict(tensors)) if translations else dict(tensors)

"""Optimizer state goes from distributed Hugging Face models to plain PyTorch's, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import smdistributed.modelparallel.torch as smp
from tests.ranks.tensor_parallel.test_huggingface import DECODER, VOCABULARY, WORDS, made, mean_loss
from tests.support.partitioned import restart
from tests.support.ranks import RankPool
from tests.support.tensor_parallel import batch, own_rows

Pools = Callable[[int], RankPool]
SAVED, LAST = 2, 5  # steps


def groups_of(model: nn.Module, by: str) -> list[dict[str, Any]]:
    """Parameters in the order that scripts give them, all together or with and without weight decay."""
    named = list(model.named_parameters())
    if by == "one":
        return [{"params": [each for _, each in named]}]
    biased = [pair for pair in named if pair[0].endswith("bias")]
    others = [pair for pair in named if not pair[0].endswith("bias")]
    if by == "names":
        return [{"params": others, "weight_decay": 0.1}, {"params": biased, "weight_decay": 0.0}]
    return [
        {"params": [each for _, each in others], "weight_decay": 0.1},
        {"params": [each for _, each in biased], "weight_decay": 0.0},
    ]


def adam(model: nn.Module, by: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model, by), lr=0.01, amsgrad=True)


class Plain:
    """A training of plain PyTorch."""

    def __init__(self, name: str, by: str) -> None:
        self.model = made(name)
        self.optimizer = adam(self.model, by)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            loss = mean_loss(self.model, *batch(WORDS, VOCABULARY, step))
            torch.autograd.backward(loss)
            self.optimizer.step()
            losses.append(loss.item())
        return losses


class Distributed:
    """The same training of distributed modules, or of the original's, in stages."""

    def __init__(self, name: str, by: str, *, tensor: int, stages: int, is_distributed: bool = True) -> None:
        restart(tensor_parallel_degree=tensor, partitions=stages, ddp=True, prescaled_batch=True)
        with smp.tensor_parallelism(enabled=is_distributed):
            module = made(name)
        self.model = smp.DistributedModel(module)
        self.optimizer = smp.DistributedOptimizer(adam(self.model, by))

        @smp.step
        def step_function(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            loss = mean_loss(self.model, ids, mask)
            self.model.backward(loss)
            return loss

        self.step_function = step_function

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            ids, mask = (own_rows(one) for one in batch(WORDS, VOCABULARY, step))
            self.optimizer.zero_grad()
            loss = self.step_function(ids, mask).reduce_mean()
            self.optimizer.step()
            dist.all_reduce(loss, group=smp.get_dp_process_group())
            losses.append(loss.item() / smp.dp_size())
        return losses


def close(found: list[float], wanted: list[float]) -> None:
    torch.testing.assert_close(found, wanted, rtol=5e-6, atol=0.0)


def goes_both_ways(name: str, by: str, folder: str) -> None:
    before, after = range(SAVED), range(SAVED, LAST)
    undisturbed = Plain(name, by)
    undisturbed.train(before)
    weights, moments = copy.deepcopy((undisturbed.model.state_dict(), undisturbed.optimizer.state_dict()))
    wanted = undisturbed.train(after)

    # From plain PyTorch, before and after the first step has cut the model.
    for is_cut in (False, True):
        job = Distributed(name, by, tensor=2, stages=2)
        if is_cut:
            job.train(range(1))
        job.model.load_state_dict(smp.state.module_manager.translate_functions[0][1](weights))
        job.optimizer.load_state_dict(copy.deepcopy(moments))  # torch trains what it is given
        close(job.train(after), wanted)

    # To plain PyTorch, and to the same model without distributed modules.
    job = Distributed(name, by, tensor=2, stages=2)
    job.train(before)
    smp.save_checkpoint(folder, "full", partial=False, model=job.model, optimizer=job.optimizer)
    close(job.train(after), wanted)
    smp.barrier()
    plain = Plain(name, by)
    plain.model.load_state_dict(torch.load(f"{folder}/full"))
    plain.optimizer.load_state_dict(torch.load(f"{folder}/optimizer_full"))
    close(plain.train(after), wanted)
    for is_distributed, tensor in ((False, 1), (True, 1), (True, 2)):
        job = Distributed(name, by, tensor=tensor, stages=2, is_distributed=is_distributed)
        smp.resume_from_checkpoint(folder, "full", partial=False)
        close(job.train(after), wanted)
        if not is_distributed:
            smp.save_checkpoint(folder, "of plain", partial=False, model=job.model, optimizer=job.optimizer)
    smp.barrier()
    smp.resume_from_checkpoint(folder, "of plain", partial=False)


@pytest.mark.parametrize(
    ("name", "by"),
    [("gpt2", "one"), ("gpt2", "names"), ("gptj", "one"), ("gptneo", "kinds"), ("bert", "kinds")],
)
def test_training_goes_on_as_if_undisturbed_with_and_without_distributed_modules(
    pool: Pools, tmp_path: Path, name: str, by: str
) -> None:
    pool(4).run(goes_both_ways, name, by, str(tmp_path))


def body_under_own_head(folder: str, settings: dict[str, Any]) -> None:
    """The body alone is distributed, under another name, and biases of one axis are a group of their own.

    Checkpoints are loaded and saved again before the first step has cut the model.
    """
    config = transformers.GPT2Config(**DECODER, pad_token_id=0)

    def by_axes(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        groups = [[pair for pair in named if (pair[1].dim() > 1) is wanted] for wanted in (True, False)]
        return [
            {"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)
        ]

    def job(is_distributed: bool) -> tuple[Any, Any, Callable[[int], None]]:
        degree = 2 if is_distributed else 1
        restart(tensor_parallel_degree=degree, ddp=True, prescaled_batch=True, **settings)
        torch.manual_seed(3)
        with smp.tensor_parallelism(enabled=is_distributed):
            module = transformers.GPT2ForSequenceClassification(config)
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(by_axes(model), lr=0.1, momentum=0.9))

        @smp.step
        def step(ids: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=ids, labels=ids[:, 0] % 2).loss
            model.backward(loss)
            return loss

        def gradients(number: int) -> None:
            optimizer.zero_grad()
            step(own_rows(batch(WORDS, VOCABULARY, number)[0]))

        return model, optimizer, gradients

    for number, is_distributed in enumerate((True, False)):
        model, optimizer, gradients = job(is_distributed)
        for step in range(2):
            gradients(step)
            optimizer.step()
        smp.save_checkpoint(folder, f"full{number}", partial=False, model=model, optimizer=optimizer)
        state = model.state_dict(), optimizer.state_dict()
        model, optimizer, _ = job(not is_distributed)
        smp.resume_from_checkpoint(folder, f"full{number}", partial=False)
        smp.save_checkpoint(folder, f"over{number}", partial=False, model=model, optimizer=optimizer)
        model, optimizer, _ = job(is_distributed)
        smp.resume_from_checkpoint(folder, f"over{number}", partial=False)
        found = model.state_dict(), optimizer.state_dict()["state"]
        torch.testing.assert_close(found, (state[0], state[1]["state"]), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_distributed_body_under_a_head_of_its_own_loads_into_the_original_and_back(
    pool: Pools, tmp_path: Path, settings: dict[str, Any]
) -> None:
    pool(2).run(body_under_own_head, str(tmp_path), settings)
    names = torch.load(tmp_path / "full0").keys()
    assert (
        names
        == transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**DECODER)).state_dict().keys()
    )

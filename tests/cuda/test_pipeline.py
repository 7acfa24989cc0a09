"""Models in parts on CUDA train as plain PyTorch on the same device: wiring, schedules, replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.cuda import CudaRanks
from tests.support.equality import Result, Setup, differences, find, reference, run_smp, united
from tests.support.made_on_gpu import on_device
from tests.support.ranks import RankFailed

Gpus = Callable[[int], CudaRanks]
TOLERANCE = 1e-5  # sums on a GPU have no order
CHAIN = Setup(2, 4, "chain")
LOOPED = Setup(2, 4, "looped")

# In an order that says of a failure whether it is one of the simplest messages or of more
CASES: list[tuple[str, str, Setup]] = [
    ("wiring", "sequential", Setup(2, 1, "chain")),
    ("wiring", "sequential", CHAIN),
    ("wiring", "sequential", LOOPED),
    ("wiring", "sequential", Setup(2, 8, "automatic", "simple", steps=4)),
    ("wiring", "sequential", Setup(2, 4, "chain", "1f1b")),
    ("wiring", "skips", CHAIN),
    ("wiring", "skips", LOOPED),
    ("wiring", "tied weights", CHAIN),
    ("wiring", "convolutions", CHAIN),
    ("calls", "gradients of inputs", CHAIN),
    ("branches", "bool and item", CHAIN),
    ("buffers", "batch norm", CHAIN),
    ("hooks", "full backward hooks", CHAIN),
    ("attention", "encoder", CHAIN),
    ("checkpointing", "modules, reentrant", CHAIN),
    ("checkpointing", "functions across stages, reentrant", LOOPED),
    ("huggingface", "GPT-2", Setup(2, 2, "automatic")),
]
MORE_CASES: list[tuple[str, str, Setup]] = [
    ("wiring", "sequential", Setup(2, 4, "reversed")),
    ("wiring", "sequential", Setup(2, 4, "chain", "zero_bubble")),
    ("wiring", "sequential", Setup(2, 4, "automatic", "searched v")),
    ("wiring", "sequential", replace(CHAIN, config={"active_microbatches": 1})),
    ("calls", "independent parts", CHAIN),
    ("calls", "two backwards", CHAIN),
    ("calls", "retained graph", LOOPED),
    ("calls", "evaluation inside a step", CHAIN),
    ("branches", "nonzero and masks", LOOPED),
    ("containers", "dicts", CHAIN),
    ("hooks", "tensor hooks", LOOPED),
    ("hooks", "hooks after accumulation", CHAIN),
    ("functions", "custom functions in the glue", LOOPED),
    ("inplace", "glue", LOOPED),
    ("inplace", "a module that writes its input", CHAIN),
    ("attention", "attention in the glue", LOOPED),
    ("checkpointing", "functions across stages, non-reentrant", CHAIN),
    ("precision", "bfloat16 weights", CHAIN),
    ("recurrent", "lstm", CHAIN),
    ("huggingface", "BERT, eager", Setup(2, 2, "automatic")),
]
MORE_RANKS: list[tuple[str, str, Setup]] = [
    ("wiring", "sequential", Setup(4, 4, "chain")),
    ("wiring", "skips", Setup(4, 4, "looped")),
    ("wiring", "sequential", Setup(2, 4, "chain", replicas=2)),
    ("huggingface", "GPT-2", Setup(2, 2, "automatic", replicas=2)),
]


def both(family: str, name: str, setup: Setup) -> tuple[Result, Result | None]:
    """What training left on this rank; on the first one also what plain PyTorch leaves on the same device."""
    found = run_smp(family, name, setup)
    parameters = [*found.parameters.values(), *found.buffers.values()]
    wanted = None
    if torch.distributed.get_rank() == 0:
        wanted = reference(family, name, setup.microbatches, steps=setup.steps, replicas=setup.replicas)
        parameters += wanted.parameters.values()
    kinds = {each.device.type for each in parameters}
    assert len(kinds) == 1, f"some tensors are elsewhere: {kinds}"
    return on_cpu(found), None if wanted is None else on_cpu(wanted)


def on_cpu(result: Result) -> Result:
    gradients: list[dict[str, Tensor | None]] = [{} for _ in result.gradients]
    for found, mine in zip(gradients, result.gradients, strict=True):
        found |= {name: None if each is None else each.cpu() for name, each in mine.items()}
    parameters = {name: each.cpu() for name, each in result.parameters.items()}
    buffers = {name: each.cpu() for name, each in result.buffers.items()}
    return replace(result, gradients=gradients, parameters=parameters, buffers=buffers)


def trains_like_plain_pytorch(gpus: Gpus, family: str, name: str, setup: Setup) -> None:
    run = partial(gpus(setup.stages * setup.replicas).run, timeout=60.0, group_timeout=30.0)
    try:
        results = run(on_device, both, family, name, setup)
    except RankFailed as failed:
        pytest.fail(f"{name} ({setup}): {failed}", pytrace=False)
    wanted = results[0][1]
    assert wanted is not None
    tolerance = max(find(family, name).tolerance, TOLERANCE)
    lines = differences(
        united([found for found, _ in results], setup),
        wanted,
        tolerance=tolerance,
        buffers=setup.replicas == 1,
    )
    wrong = list(lines)
    assert not wrong, "\n".join(wrong)


def _label(value: object) -> str:
    return str(value)


@pytest.mark.parametrize(("family", "name", "setup"), CASES, ids=_label)
def test_two_stages_train_like_plain_pytorch(gpus: Gpus, family: str, name: str, setup: Setup) -> None:
    trains_like_plain_pytorch(gpus, family, name, setup)


@pytest.mark.parametrize(("family", "name", "setup"), MORE_RANKS, ids=_label)
def test_four_ranks_train_like_plain_pytorch(gpus: Gpus, family: str, name: str, setup: Setup) -> None:
    trains_like_plain_pytorch(gpus, family, name, setup)


@pytest.mark.parametrize(("family", "name", "setup"), MORE_CASES, ids=_label)
def test_more_models_train_like_plain_pytorch(gpus: Gpus, family: str, name: str, setup: Setup) -> None:
    trains_like_plain_pytorch(gpus, family, name, setup)

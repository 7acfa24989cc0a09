"""``smd plan`` shows what a plan would be, without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from opensmd.modelparallel.planning.plan import Plan
from opensmd.tools.plan import plan as plan_command

HERE = __name__


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU())


def model_alone() -> nn.Module:
    return nn.Sequential(*[block() for _ in range(4)])


def model_and_inputs() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return model_alone(), (torch.ones(8, 64),)


def model_and_step() -> tuple[nn.Module, Any]:
    model = model_alone()
    return model, lambda: model(torch.ones(8, 64)).sum()


def nonsense() -> int:
    return 3


@pytest.mark.parametrize("factory", ["model_alone", "model_and_inputs", "model_and_step"])
def test_smd_plan_shows_plan_memory_and_bubble(factory: str) -> None:
    arguments = [f"{HERE}:{factory}", "--partitions", "4", "--microbatches", "8"]
    result = CliRunner().invoke(plan_command, arguments)
    assert result.exit_code == 0, result.output
    for word in ("Modules in the order of execution", "peak memory", "predicted bubble with 8 microbatches"):
        assert word in result.output


def test_smd_plan_says_when_partitions_stay_empty() -> None:
    result = CliRunner().invoke(plan_command, [f"{HERE}:model_alone", "--partitions", "60"])
    assert result.exit_code == 0, result.output
    assert "nothing of the model lives on partition" in result.stderr
    assert "predicted bubble with 1 microbatch:" in result.output


def test_smd_plan_writes_json_that_is_a_plan() -> None:
    result = CliRunner().invoke(plan_command, [f"{HERE}:model_and_step", "--json"])
    assert Plan.from_json(result.output).stages == 2


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "module:factory"),
        ("no_such_module:f", "no_such_module"),
        (f"{HERE}:nonsense", "returned int"),
    ],
)
def test_smd_plan_explains_what_it_cannot_use(target: str, message: str) -> None:
    result = CliRunner().invoke(plan_command, [target])
    assert result.exit_code != 0
    assert message in result.output

"""``smd plan`` shows what a plan would be, without ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.rank_bytes import Sharing, bytes_of_rank
from opensmd.tools.gpt_like import gpt_1t, gpt_175b
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


def of_175_billion() -> nn.Module:
    return gpt_175b()[0]


def of_a_trillion() -> nn.Module:
    return gpt_1t()[0]


def nonsense() -> int:
    return 3


def of_a_width(width: int) -> nn.Module:
    return nn.Linear(width, width)


A_MODEL = nn.Linear(4, 4)


@pytest.mark.parametrize("factory", ["model_alone", "model_and_inputs", "model_and_step"])
def test_smd_plan_shows_plan_memory_and_bubble(factory: str) -> None:
    arguments = [f"{HERE}:{factory}", "--partitions", "4", "--microbatches", "8"]
    result = CliRunner().invoke(plan_command, arguments)
    assert result.exit_code == 0, result.output
    for word in ("Modules in the order of execution", "peak memory", "predicted bubble with 8 microbatches"):
        assert word in result.output


def test_smd_plan_counts_the_links_between_hosts() -> None:
    words = [f"{HERE}:model_and_inputs", "--partitions", "4", "--hosts", "2", "--link", "0.001"]
    made = CliRunner().invoke(plan_command, [*words, "--json"])
    assert made.exit_code == 0, made.output
    crossings = json.loads(made.output)["crossings"]
    assert [crossing["between_hosts"] for crossing in crossings] == [False, True, False]
    assert crossings[1]["seconds"] > crossings[1]["bytes"] * 8 / 1e6 > 100 * crossings[0]["seconds"]
    shown = CliRunner().invoke(plan_command, words)
    assert "between hosts, 16." in " ".join(shown.output.split())
    chosen = CliRunner().invoke(plan_command, [f"{HERE}:model_and_step", "--auto", "4", *words[3:]])
    assert chosen.exit_code == 0, chosen.output
    uneven = CliRunner().invoke(plan_command, [*words[:4], "3"])
    assert uneven.exit_code == 2 and "4 ranks cannot be on 3 hosts" in uneven.output


def test_smd_plan_counts_the_bytes_of_a_rank() -> None:
    words = "--partitions 4 --tensor 2 --replicas 4 --sharded 2 --precision bf16 --microbatches 4"
    made = CliRunner().invoke(plan_command, [f"{HERE}:model_alone", *words.split()])
    assert made.exit_code == 0, made.output
    assert "32 ranks: 4 partitions x 2 x 4 replicas" in made.output
    rows = made.output.partition("Memory of each rank")[2].splitlines()
    kept = 64 * 65 / (2 * 2)  # elements of a stage's one layer on a rank
    numbers = [f"{kept * width / 1024:.1f} KiB" for width in (2, 2, 8, 8)]
    assert sum(all(number in row for number in numbers) for row in rows) == 4, rows
    refused = CliRunner().invoke(plan_command, [f"{HERE}:model_alone", "--replicas", "3", "--sharded", "2"])
    assert "3 replicas cannot be cut into groups of 2" in refused.output


@pytest.mark.parametrize(
    ("factory", "billions", "partitions"), [("of_175_billion", 175, 12), ("of_a_trillion", 1000, 16)]
)
def test_smd_plan_takes_models_of_the_meta_device_that_no_machine_could_hold(
    factory: str, billions: float, partitions: int
) -> None:
    made = CliRunner().invoke(plan_command, [f"{HERE}:{factory}", f"--partitions={partitions}", "--json"])
    loads = Plan.from_json(made.output).loads
    assert len(loads) == partitions
    sharing = Sharing(tensor=8, replicas=4, sharded=2, half=True)
    elements = sum(bytes_of_rank(load, sharing).parameters for load in loads) / 2 * (8 * 2)
    assert elements == pytest.approx(billions * 1e9, rel=0.02)


def test_smd_plan_follows_a_step_on_the_meta_device() -> None:
    words = ["opensmd.tools.gpt_like:gpt_125m", "--partitions=4", "--replicas=2", "--sharded=2", "--json"]
    made = CliRunner().invoke(plan_command, words)
    ranks = json.loads(made.output)["ranks"]
    assert sum(rank["parameters"] for rank in ranks) == pytest.approx(125e6 * 4 / 2, rel=0.02)
    assert all(rank["activations"] > 2048 * 768 * 4 for rank in ranks), "at least a layer's input"


def test_smd_plan_says_when_partitions_stay_empty() -> None:
    result = CliRunner().invoke(plan_command, [f"{HERE}:model_alone", "--partitions", "60"])
    assert result.exit_code == 0, result.output
    assert "nothing of the model lives on partition" in result.stderr
    assert "predicted bubble with 1 microbatch:" in result.output


def test_smd_plan_writes_json_that_is_a_plan() -> None:
    result = CliRunner().invoke(plan_command, [f"{HERE}:model_and_step", "--json"])
    assert Plan.from_json(result.output).stages == 2


def test_a_rank_is_predicted_to_have_its_tensors_a_sixteenth_and_the_interpreter() -> None:
    result = CliRunner().invoke(plan_command, [f"{HERE}:model_and_step", "--json", "--replicas=2"])
    for rank in json.loads(result.output)["ranks"]:
        live, resident = rank.pop("live"), rank.pop("resident")
        tensors = sum(rank.values())
        assert live - tensors > 20 << 20, "Python and torch"
        assert resident - live == pytest.approx(tensors / 16)
        assert rank["buckets"] == rank["gradients"] > 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "module:factory"),
        ("no_such_module:f", "no_such_module"),
        (f"{HERE}:nonsense", "returned int"),
        (f"{HERE}:of_a_width", "missing a required argument: 'width'; it is called without arguments"),
        (f"{HERE}:A_MODEL", "is of type Linear; expected a function that returns the model"),
    ],
)
def test_smd_plan_explains_what_it_cannot_use(target: str, message: str) -> None:
    result = CliRunner().invoke(plan_command, [target])
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_smd_plan_chooses_a_strategy_for_so_many_ranks() -> None:
    arguments = [f"{HERE}:model_and_step", "--auto", "2", "--batch", "8"]
    shown = CliRunner().invoke(plan_command, arguments)
    assert shown.exit_code == 0, shown.output
    assert "Strategies, the chosen one first" in shown.output and "microbatches" in shown.output
    made = json.loads(CliRunner().invoke(plan_command, [*arguments, "--json"]).output)
    assert made["chosen"]["partitions"] * made["chosen"]["replicas"] == 2
    assert made["settings"]["microbatches"] == made["chosen"]["microbatches"]
    assert len(made["next"]) == 5 and made["chosen"]["seconds"] <= made["next"][0]["seconds"]
    assert Plan.from_json(json.dumps(made["plan"])).stages == made["chosen"]["partitions"]
    tight = CliRunner().invoke(plan_command, [*arguments, "--memory", "0.000001"])
    assert "none fits into 1e-06 GiB per rank" in tight.stderr

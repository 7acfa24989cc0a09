"""``smd plan comm`` predicts the time of gradients between hosts."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from torch import nn

from opensmd.collectives.hosts.cost_model import ALGORITHMS, MIB
from opensmd.tools.cli import main


def model() -> nn.Module:
    frozen = nn.Linear(100, 100).requires_grad_(requires_grad=False)
    return nn.Sequential(nn.Linear(1024, 256, bias=False), frozen)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["plan", "comm", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_row_for_each_number_of_hosts_up_to_ten_thousand() -> None:
    output = run("--gradients", "100", "--link", "1")
    rows = [line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│")]
    assert rows == ["2", "4", "8", "16", "64", "256", "1000", "10000"]
    assert "100.0 MiB of gradients, 8 ranks a host, 1 Gbit/s" in output


def test_a_model_is_as_large_as_its_trained_parameters_and_json_has_what_was_assumed() -> None:
    found = json.loads(run(f"{__name__}:model", "--hosts", "3", "--hosts", "5", "--json"))
    assert found["gradient_bytes"] == MIB
    assert [cluster["hosts"] for cluster in found["clusters"]] == [3, 5]
    assert found["clusters"][0]["link"] == pytest.approx(10e9 / 8 * 0.95)
    assert set(found["clusters"][0]["all_reduce"]) == set(ALGORITHMS)
    assert found["clusters"][0]["all_reduce"]["levels"]["seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give either MODULE:FACTORY or --gradients"),
        (["--gradients", "1", "--link", "0"], "link must be positive"),
        (["--gradients", "1", "--bucket", "0"], "must be positive"),
        (["no_such_module:factory"], "MODULE:FACTORY"),
    ],
)
def test_what_cannot_be_predicted_is_a_clear_error(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(main, ["plan", "comm", *arguments])
    assert result.exit_code == 2 and text in result.output

"""smdrun's options as torchrun takes them, and from the variables of Kubeflow's operators."""

from __future__ import annotations

import click
import pytest

from opensmd.launch.cli import main
from opensmd.launch.option_values import require_command

POD = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}


def options(monkeypatch: pytest.MonkeyPatch, *arguments: str, **variables: str) -> dict[str, object]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return main.make_context("smdrun", [*arguments, "train.py"]).params


def test_smdrun_in_a_pod_takes_its_place_from_the_variables_of_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = options(monkeypatch, **POD)
    place = {name: found[name] for name in ("nnodes", "node_rank", "ranks", "master_addr", "master_port")}
    assert place == {
        "nnodes": 2,
        "node_rank": 1,
        "ranks": 4,
        "master_addr": "train-node-0-0.train",
        "master_port": 29400,
    }


def test_a_command_line_of_torchrun_may_keep_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    found = options(monkeypatch, "--standalone", "--nnodes=1", "--nproc_per_node=2", "--max_restarts", "3")
    assert (found["ranks"], found["nnodes"], found["max_restarts"], found["script"]) == (2, 1, 3, "train.py")
    host = ("--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=1234", "--log_dir=logs")
    assert options(monkeypatch, *host)["node_rank"] == 1


def test_options_and_smdruns_own_variables_come_before_those_of_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = options(monkeypatch, "--master-port", "1234", SMDRUN_RANKS="3", **POD)
    assert (found["ranks"], found["master_port"]) == (3, 1234)


@pytest.mark.parametrize(("text", "ranks"), [("auto", None), ("cpu", None), ("2", 2)])
def test_the_number_of_ranks_may_be_left_to_smdrun(
    text: str, ranks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = options(monkeypatch, PET_NPROC_PER_NODE=text, PET_NNODES="2:2")
    assert (found["ranks"], found["nnodes"]) == (ranks, 2)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("PET_NNODES", "1:4", "1:4 is a range; smdrun starts a job on a fixed number of hosts"),
        ("PET_NPROC_PER_NODE", "many", "'many' is not a whole number of at least 1"),
    ],
)
def test_what_smdrun_cannot_take_of_torchrun_is_refused(
    name: str, text: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(click.UsageError, match=why):
        options(monkeypatch, **{name: text})


@pytest.mark.parametrize("text", ["", " ", "ssh 'x"])
def test_what_is_no_command_is_refused_before_a_host_is_taken_for_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"--ssh .* is no command"):
        require_command("--ssh", text)

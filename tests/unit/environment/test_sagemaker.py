"""What a container tells a script, worked out for the machine at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opensmd.environment.sagemaker import Job, hyperparameters, job_variables, parse_mp_parameters

JOB = Job(
    script=Path("code/train.py"),
    args=["--lr", "0.1", "--name=x", "--fast", "--batch-size", "8"],
    output=Path("/tmp/out"),
    host="here",
    hosts=["there", "here"],
    cpus=4,
    gpus=2,
    ranks_per_host=2,
    channels={"training": Path("/data/train")},
)


def test_the_variables_scripts_read_are_there() -> None:
    variables = job_variables(JOB)
    assert variables["SM_MODEL_DIR"] == "/tmp/out/model"
    assert variables["SM_CHANNEL_TRAINING"] == "/data/train"
    assert (json.loads(variables["SM_HOSTS"]), variables["SM_CURRENT_HOST"]) == (["there", "here"], "here")
    assert (variables["SM_NUM_GPUS"], variables["SM_NUM_CPUS"]) == ("2", "4")
    assert json.loads(variables["SM_HPS"]) == {"lr": 0.1, "name": "x", "fast": True, "batch_size": 8}
    assert (variables["SM_HP_LR"], variables["SM_HP_NAME"]) == ("0.1", "x")
    assert json.loads(variables["SM_USER_ARGS"]) == JOB.args


def test_parallelism_is_switched_on_only_when_asked_for() -> None:
    plain = json.loads(job_variables(JOB)["SM_FRAMEWORK_PARAMS"])
    assert "sagemaker_mpi_enabled" not in plain
    assert "sagemaker_distributed_dataparallel_enabled" not in plain
    assert "SM_HP_MP_PARAMETERS" not in job_variables(JOB)


def test_hugging_face_finds_its_gates_open() -> None:
    model = job_variables(Job(**{**vars(JOB), "mp_parameters": {"partitions": 2}}))
    assert json.loads(model["SM_HP_MP_PARAMETERS"]) == {"partitions": 2}
    assert json.loads(model["SM_FRAMEWORK_PARAMS"])["sagemaker_mpi_enabled"] is True
    data = job_variables(Job(**{**vars(JOB), "dataparallel": True}))
    assert json.loads(data["SM_FRAMEWORK_PARAMS"])["sagemaker_distributed_dataparallel_enabled"] is True


def test_model_parallel_parameters_are_read_in_all_three_forms(tmp_path: Path) -> None:
    file = tmp_path / "mp.json"
    file.write_text('{"partitions": 2, "ddp": true}')
    expected = {"partitions": 2, "ddp": True}
    for text in ('{"partitions": 2, "ddp": true}', "partitions=2,ddp=True", str(file)):
        assert parse_mp_parameters(text) == expected


def test_model_parallel_parameters_of_no_form_are_refused() -> None:
    with pytest.raises(ValueError, match="key=value"):
        parse_mp_parameters("partitions")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"partitions": 2', "is not JSON: "),
        ("missing.json", "cannot read the model-parallel parameters: .*missing.json"),
    ],
)
def test_model_parallel_parameters_that_cannot_be_read_say_why(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mp_parameters(text)


@pytest.mark.parametrize("text", ["", "partitions", "missing.json"])
def test_a_scripts_own_argument_does_not_keep_it_from_starting(text: str) -> None:
    assert hyperparameters(["--mp_parameters", text, "--lr", "1"]) == {"lr": 1}


def test_hyperparameters_carry_the_model_parallel_ones_of_the_command_line() -> None:
    found = hyperparameters(["--mp_parameters", "partitions=2,microbatches=4", "positional"])
    assert found == {"mp_parameters": {"partitions": 2, "microbatches": 4}}

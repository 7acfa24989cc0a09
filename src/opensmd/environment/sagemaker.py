"""What a SageMaker container tells a training script, derived for the current machine; pure.

The names are those of the SageMaker training toolkit. Scripts written for it read their defaults from them
(``os.environ["SM_MODEL_DIR"]``), and Hugging Face's Trainer decides by SM_HP_MP_PARAMETERS and
SM_FRAMEWORK_PARAMS whether it runs in parallel. ``smdrun`` sets them for its ranks unless the user has.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["JSON", "Job", "hyperparameters", "job_variables", "json_object", "parse_mp_parameters"]

JSON = str | int | float | bool | None | Mapping[str, "JSON"] | Sequence["JSON"]


@dataclass(frozen=True)
class Job:
    """One training job on this host.

    The script is told to write under ``output``. ``host`` is one of ``hosts``, all names in order, from which
    scripts derive the number of a host. ``mp_parameters`` turns on model parallelism, and ``dataparallel``
    data parallelism, like a container's launcher.
    """

    script: Path
    args: Sequence[str]
    output: Path
    host: str
    hosts: Sequence[str]
    cpus: int
    gpus: int
    ranks_per_host: int
    channels: Mapping[str, Path] = field(default_factory=dict)
    mp_parameters: Mapping[str, JSON] = field(default_factory=dict)
    dataparallel: bool = False


def job_variables(job: Job) -> dict[str, str]:
    """Return the ``SM_*`` variables of a job."""
    hyper = hyperparameters(job.args)
    if job.mp_parameters:
        hyper["mp_parameters"] = dict(job.mp_parameters)
    texts = {
        **_paths(job),
        "SM_CURRENT_HOST": job.host,
        "SM_NUM_CPUS": str(job.cpus),
        "SM_NUM_GPUS": str(job.gpus),
        "SM_CURRENT_INSTANCE_TYPE": "local",
        "SM_LOG_LEVEL": "20",
        "SM_USER_ENTRY_POINT": job.script.name,
        "SM_MODULE_NAME": job.script.stem,
        "SM_MODULE_DIR": str(job.script.resolve().parent),
        **{f"SM_CHANNEL_{name.upper()}": str(path.resolve()) for name, path in job.channels.items()},
        **{f"SM_HP_{name.upper()}": _text(value) for name, value in hyper.items()},
    }
    documents: dict[str, JSON] = {
        "SM_HOSTS": list(job.hosts),
        "SM_CHANNELS": sorted(job.channels),
        "SM_HPS": hyper,
        "SM_USER_ARGS": list(job.args),
        "SM_FRAMEWORK_PARAMS": _framework(job),
    }
    return {**texts, **{name: json.dumps(value) for name, value in documents.items()}}


def hyperparameters(args: Sequence[str]) -> dict[str, JSON]:
    """Parse the ``--name value`` and ``--name=value`` pairs of a command line; a bare ``--name`` is true.

    Dashes become underscores; values are parsed as JSON if possible. Unreadable model-parallel parameters are
    left out: the script gets the arguments, too, and ``smp.init`` says what is wrong.
    """
    parameters: dict[str, JSON] = {}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        elif not equals:
            value = "true"
        key = name.replace("-", "_")
        if key != "mp_parameters":
            parameters[key] = _value(value)
            continue
        with contextlib.suppress(ValueError):
            parameters[key] = parse_mp_parameters(value)
    return parameters


def parse_mp_parameters(text: str) -> dict[str, JSON]:
    """Parse model-parallel parameters: a JSON object, the path of a JSON file, or ``key=value,key=value``.

    Raises:
        ValueError: it is none of the three, or the file does not exist.
    """
    if text.lstrip().startswith("{"):
        return json_object(text, "mp_parameters")
    if text.endswith(".json"):
        try:
            return json_object(Path(text).read_text(), text)
        except OSError as error:
            raise ValueError(f"cannot read the model-parallel parameters: {error}") from None
    pairs = [pair.partition("=") for pair in text.split(",")]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError(
            f"the model-parallel parameters are {text!r}; expected a JSON object, the path of a .json file, "
            "or key=value,key=value such as pipeline_parallel_degree=2,microbatches=4"
        )
    return {name.strip(): _value(value.strip()) for name, _, value in pairs}


def json_object(text: str, source: str) -> dict[str, JSON]:
    """Parse a JSON object; ``source`` says in messages where it came from.

    Raises:
        ValueError: it is not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}={text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{source}={text!r}: expected a JSON object of parameters")
    return value


def _paths(job: Job) -> dict[str, str]:
    output = job.output.resolve()
    return {
        "SM_OUTPUT_DIR": str(output),
        "SM_MODEL_DIR": str(output / "model"),
        "SM_OUTPUT_DATA_DIR": str(output / "data"),
        "SM_OUTPUT_INTERMEDIATE_DIR": str(output / "intermediate"),
        "SM_INPUT_DIR": str(output / "input"),
        "SM_INPUT_CONFIG_DIR": str(output / "input" / "config"),
    }


def _framework(job: Job) -> dict[str, JSON]:
    params: dict[str, JSON] = {"sagemaker_instance_type": "local"}
    if job.mp_parameters:
        params["sagemaker_mpi_enabled"] = True
        params["sagemaker_mpi_num_of_processes_per_host"] = job.ranks_per_host
        params["sagemaker_mpi_custom_mpi_options"] = ""
    if job.dataparallel:
        params["sagemaker_distributed_dataparallel_enabled"] = True
    return params


def _value(text: str) -> JSON:
    try:
        value: JSON = json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)
    return value


def _text(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value)

"""The three sources of settings, and the keys that are ignored.

The sources are the dict passed to ``smp.init``, the launcher's ``SM_HP_MP_PARAMETERS`` (JSON), and
``--mp_parameters k=v,k=v`` on the script's command line. Later ones take precedence.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from opensmd.environment.sagemaker import json_object
from opensmd.modelparallel.settings.config import Config
from opensmd.script_level import script_level

__all__ = ["load_config", "parse_pairs"]

VARIABLE = "SM_HP_MP_PARAMETERS"
OPTION = "--mp_parameters"

# Seen in public notebooks but documented nowhere; scripts with them must run. With their harmless values.
_UNDOCUMENTED = {
    "static_mode": False,
    "fast_mode": False,
    "overlapping_allreduce": True,
    "checkpoint_attentions": False,
    "_match_weights": False,
    "_fp32_grad_accumulation": False,
    "use_times": False,
    "xla": False,
}
# Documented only for TensorFlow; the launcher also accepts them for PyTorch.
_OF_TENSORFLOW = {"horovod": False, "contiguous": True}
# Details of sharded parameters.
_OF_SHARDING = (
    "sdp_reduce_bucket_size",
    "sdp_param_persistence_threshold",
    "sdp_max_live_parameters",
    "sdp_gradient_clipping",
)
# Details of absent features, or of what is always done here: harmless but without effect.
_WITHOUT_EFFECT = {
    "sdp_hierarchical_allgather",
    "ddp_port",
    "ddp_dist_backend",
}


def load_config(
    given: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
) -> Config:
    """Combine the three sources and check every key.

    Args:
        given: what the script passed to ``smp.init``.
        environ: ``os.environ`` by default.
        arguments: the command line, ``sys.argv[1:]`` by default.

    Raises:
        TypeError: ``given`` is not a dict.
        ValueError: an unknown key, a bad value or a contradiction; the message names the valid keys.

    Warns:
        UserWarning: a key that is ignored.
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"smp.init: expected a dict of modelparallel parameters, got {given!r}")
    environ = os.environ if environ is None else environ
    arguments = sys.argv[1:] if arguments is None else arguments
    sources = (given or {}, _from_variable(environ), _from_arguments(arguments))
    values = {name: value for source in sources for name, value in _one_name(source).items()}
    values = _without_foreign(values)
    _require_known(values)
    try:
        config = Config(**values)
    except ValidationError as error:
        raise ValueError("modelparallel parameters: " + "; ".join(_reasons(error))) from None
    _warn_of_idle(config, values)
    return config


def parse_pairs(text: str) -> dict[str, Any]:
    """Parse ``"partitions=2,ddp=True,pipeline=simple"``; values are JSON if possible, else text.

    A single JSON object, as from the launcher, is also accepted.

    Raises:
        ValueError: a piece is not ``key=value``.
    """
    if text.lstrip().startswith("{"):
        return json_object(text, OPTION)
    values: dict[str, Any] = {}
    for piece in filter(None, map(str.strip, text.split(","))):
        key, equals, value = piece.partition("=")
        if not equals or not key.strip():
            raise ValueError(
                f"{OPTION} {text!r}: expected key=value pairs with commas between, got {piece!r}"
            )
        values[key.strip()] = _value(value.strip())
    return values


def _without_foreign(values: Mapping[str, Any]) -> dict[str, Any]:
    """Remove settings that are not this library's, and warn about those that are not harmless."""
    kept = dict(values)
    for names, why in ((_UNDOCUMENTED, "undocumented"), (_OF_TENSORFLOW, "for TensorFlow alone")):
        for name in sorted(names.keys() & set(values)):
            if str(kept.pop(name)).lower() not in (str(names[name]).lower(), "none"):
                warnings.warn(
                    f"modelparallel parameter {name!r} is {why} and ignored", stacklevel=script_level()
                )
    return kept


def _require_known(values: Mapping[str, Any]) -> None:
    unknown = sorted(set(values) - set(Config.model_fields), key=str)
    if unknown:
        valid = sorted({*Config.model_fields, "partitions"})
        hints = ", ".join(f"{name}{_meant(name, valid)}" for name in unknown)
        raise ValueError(f"unknown modelparallel parameters: {hints}. The valid ones are: {', '.join(valid)}")


def _warn_of_idle(config: Config, values: Mapping[str, Any]) -> None:
    """Warn about settings that have no effect, on their own or in combination."""
    idle = dict.fromkeys(
        () if config.shards_parameters else _OF_SHARDING, "without sharded_data_parallel_degree"
    )
    idle |= dict.fromkeys(_WITHOUT_EFFECT, "here")
    for name in sorted(idle.keys() & set(values)):
        if getattr(config, name) != Config.model_fields[name].default:
            warnings.warn(
                f"modelparallel parameter {name}={values[name]!r} has no effect {idle[name]}",
                stacklevel=script_level(),
            )


def _meant(name: object, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), valid, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _one_name(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return one source's settings with ``partitions`` under its newer name."""
    values = dict(source)
    if "partitions" in values:
        older = values.pop("partitions")
        newer = values.setdefault("pipeline_parallel_degree", older)
        if newer != older and str(newer) != str(older):
            raise ValueError(
                f"partitions={older!r} and pipeline_parallel_degree={newer!r} are two names of one setting; "
                "give one of them"
            )
    return values


def _value(text: str) -> Any:
    lowered = text.lower()
    if lowered in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(lowered)
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _from_variable(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(VARIABLE, "").strip()
    return json_object(text, VARIABLE) if text else {}


def _from_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    for index, argument in enumerate(arguments):
        if argument.startswith(OPTION + "="):
            return parse_pairs(argument.removeprefix(OPTION + "="))
        if argument == OPTION and index + 1 < len(arguments):
            return parse_pairs(arguments[index + 1])
    return {}


def _reasons(error: ValidationError) -> list[str]:
    """Return what is wrong with each key, but not with defaults that depend on a wrong value."""
    return [_of_key(problem) for problem in error.errors() if problem["type"] != "default_factory_not_called"]


def _of_key(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if where == "pipeline_parallel_degree":
        where = "partitions"
    text = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}={error['input']!r}: {text}" if where else text

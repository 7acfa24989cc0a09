"""The setting ``elastic``, and the settings it cannot be combined with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["HINDERS_REPLICAS", "Elastic", "ElasticSetting", "require_replicas"]

# What keeps state where another replica would not find it, splits it over replicas, or measures them.
HINDERS_REPLICAS = (
    "fp16",
    "bf16",
    "shard_optimizer_state",
    "sharded_data_parallel_degree",
    "tensor_parallel_degree",
    "delayed_parameter_initialization",
    "offload_activations",
    "replan",
    "auto",
)


class Elastic(BaseModel):
    """How replicas drop out and join.

    Attributes:
        min_replicas: with fewer, the job ends.
        timeout: seconds that ranks wait for each other in process groups, and for a lost replica's ranks that
            are not known to have ended.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(default=1, ge=1)
    timeout: float = Field(default=300.0, gt=0.0)


def _with_defaults(value: Any) -> Any:
    return {} if value is True else None if value is False else value


ElasticSetting = Annotated[Elastic | None, BeforeValidator(_with_defaults)]


def require_replicas(hindering: Sequence[str], *, ddp: bool, pipeline: str) -> None:
    """Raise if ``elastic`` cannot be combined with these of HINDERS_REPLICAS, or with other settings."""
    if not ddp:
        raise ValueError("elastic needs ddp=True: without it there are no replicas")
    hinder = [*hindering, *["pipeline='searched'"] * (pipeline == "searched")]
    if hinder:
        raise ValueError(f"elastic cannot be combined with {' and '.join(hinder)}")

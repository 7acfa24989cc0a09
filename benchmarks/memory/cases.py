"""The settings that are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "PLAIN", "Case"]

PLAIN = "two replicas"
BY_BLOCK = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_max_live_parameters": 1,
}
OFFLOADED = {"offload_activations": True, "activation_loading_horizon": 2}
DELAYED = {"delayed_parameter_initialization": True}


@dataclass(frozen=True)
class Case:
    """What a job is told.

    Attributes:
        settings: of ``smp.init``.
        checkpoints: every block is an activation checkpoint.
        tensor_parallelism: modules are distributed.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    checkpoints: bool = False
    tensor_parallelism: bool = False


CASES = {
    PLAIN: Case(),
    "`bf16`": Case({"bf16": True}),
    "activation checkpoints": Case(checkpoints=True),
    "activation checkpoints, `offload_activations`": Case(OFFLOADED, checkpoints=True),
    "`shard_optimizer_state`": Case({"shard_optimizer_state": True}),
    "`sharded_data_parallel_degree`": Case({"sharded_data_parallel_degree": 2}),
    "the same, `sdp_max_live_parameters` 1": Case(BY_BLOCK),
    "the same, `delayed_parameter_initialization`": Case(BY_BLOCK | DELAYED),
    "the same, activation checkpoints, `offload_activations`": Case(
        BY_BLOCK | DELAYED | OFFLOADED, checkpoints=True
    ),
    "`partitions` 2": Case({"partitions": 2, "microbatches": 4}),
    "`partitions` 2, `delayed_parameter_initialization`": Case(
        {"partitions": 2, "microbatches": 4, **DELAYED}
    ),
    "`tensor_parallel_degree` 2": Case({"tensor_parallel_degree": 2}, tensor_parallelism=True),
}

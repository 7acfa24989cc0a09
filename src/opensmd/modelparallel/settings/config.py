"""Every documented setting of model parallelism, checked, and which cannot be combined.

The names are those of the launcher's ``modelparallel`` parameters in SageMaker's documentation.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from opensmd.modelparallel.planning.policies.limits import most_active
from opensmd.modelparallel.planning.schedules.names import Pipeline
from opensmd.modelparallel.settings.elastic import HINDERS_REPLICAS, ElasticSetting, require_replicas

__all__ = ["Automatic", "Config"]

# Keys whose features do not exist here; their defaults are harmless.
_ABSENT = (
    "load_partition",
    "partition_file",
)
# What keeps parameters or their state where ``replan`` would not find it, or gives no times.
_HINDERS_MOVES = (
    "fp16",
    "bf16",
    "shard_optimizer_state",
    "delayed_parameter_initialization",
    "deterministic_server",
    "sharded_data_parallel_degree",
    "tensor_parallel_degree",
)
# What predictions do not cover.
_HINDERS_AUTO = ("tensor_parallel_degree", "sharded_data_parallel_degree", "shard_optimizer_state")
# Meaningless without replicas.
_NEED_REPLICAS = (
    "ddp_port",
    "ddp_dist_backend",
    "tensor_parallel_degree",
    "sharded_data_parallel_degree",
)


class Automatic(BaseModel):
    """The input from which ``auto`` chooses a strategy.

    Attributes:
        model: ``module:factory``, which returns the model and the step of one batch, as for ``smd plan``.
        batch: samples in that batch, which is divided among replicas and microbatches.
        memory_gib: memory of a rank; by default its share of the host's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    batch: int = Field(ge=1)
    memory_gib: float | None = Field(default=None, gt=0.0)


class Config(BaseModel):
    """The effective settings of model parallelism.

    Attributes:
        pipeline_parallel_degree: number of partitions; ``partitions`` is its older name.
        microbatches: the number of pieces that a step's batch is cut into.
        pipeline: the schedule: ``"interleaved"`` (alternating forwards and backwards, with weight gradients
            where a rank would wait), ``"simple"`` (all forwards first), ``"1f1b"``, ``"zero_bubble"``,
            ``"v"`` or ``"searched"`` (for the times of the stages).
        virtual_stages: the number of the model's stages on each partition; by default 2 for ``"v"``, else 1.
            At most 2 with ``"searched"``, which then lie in a V.
        active_microbatches: the most microbatches in flight; by default, partitions + 2.
        optimize: what the partitioner favours, ``"memory"`` or ``"speed"``.
        memory_weight: 0 balances only time, 1 only memory; by default 0.8, or 0.2 with ``optimize="speed"``.
        placement_strategy: ``"cluster"``, ``"spread"`` or an order of the letters D, P and T, the last of
            which varies fastest over ranks.
        auto_partition: if False, only ``smp.partition`` and ``default_partition`` place modules.
        default_partition: where modules without a place go if ``auto_partition`` is False.
        ddp: data parallelism over replicas of the partitioned model.
        deterministic_server: use the same order of work on all replicas.
        tensor_parallel_degree: ranks that share every stage's distributed modules; more than one needs ddp.
        prescaled_batch: the ranks that share a stage get the same batch. If False, each has its own, and
            distributed modules work on all of them.
        skip_tracing: partition only by the sizes of parameters, without a dry run.
        auto: choose partitions, replicas, schedule, microbatches and checkpoints from this; explicit settings
            are kept.
        replan: after two steps, switch to a better plan if they have not taken the planned times.
        elastic: let lost replicas drop out and others join while the rest goes on training; True, or a dict
            of ``min_replicas`` and ``timeout``.
        offload_activations: move inputs of checkpointed layers out of memory until their backward is near.
        activation_loading_horizon: the number of layers whose inputs may be in memory.
        delayed_parameter_initialization: let ``smp.model_creation`` create modules without memory for their
            parameters, which the first step initialises where they live.
        shard_optimizer_state: split the optimizer's state over the replicas of a stage.
        sharded_data_parallel_degree: the number of replicas over which a stage's parameters, gradients and
            optimizer state are split; 0 or 1 does not split.
        sdp_param_persistence_threshold: blocks of fewer elements stay gathered for whole steps.
        sdp_reduce_bucket_size: larger blocks are gathered and reduced in pieces, if they have pieces.
        sdp_max_live_parameters: how many elements may stay gathered from forward to backward.
        sdp_gradient_clipping: the norm to which ``optimizer.step()`` clips sharded gradients; 0 does not
            clip.
        fp16, bf16: use 16-bit parameters, trained through FP32 copies that the optimizer keeps.
        fp16_params: give distributed modules 16-bit parameters; the script itself keeps FP32 copies.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pipeline_parallel_degree: int = Field(default=1, ge=1)
    microbatches: int = Field(default=1, ge=1)
    pipeline: Pipeline = "interleaved"
    virtual_stages: int = Field(
        default_factory=lambda before: 2 if before.get("pipeline") == "v" else 1, ge=1
    )
    active_microbatches: int = Field(
        default_factory=lambda before: most_active(before.get("pipeline_parallel_degree", 1), None), ge=1
    )
    optimize: Literal["memory", "speed"] = "memory"
    memory_weight: float = Field(
        default_factory=lambda before: 0.2 if before.get("optimize") == "speed" else 0.8, ge=0.0, le=1.0
    )
    placement_strategy: str = "cluster"
    auto_partition: bool = True
    default_partition: int = Field(default=0, ge=0)
    ddp: bool = False
    deterministic_server: bool = False
    tensor_parallel_degree: int = Field(default=1, ge=1)
    activation_loading_horizon: int = Field(default=4, ge=1)
    offload_activations: bool = False
    fp16_params: bool = False
    shard_optimizer_state: bool = False
    prescaled_batch: bool = False
    skip_tracing: bool = False
    replan: bool = False
    auto: Automatic | None = None
    elastic: ElasticSetting = None
    fp16: bool = False
    bf16: bool = False
    sharded_data_parallel_degree: int = Field(default=1, ge=0)
    sdp_reduce_bucket_size: int = Field(default=500_000_000, ge=1)
    sdp_param_persistence_threshold: int = Field(default=1_000_000, ge=0)
    sdp_max_live_parameters: int = Field(default=1_000_000_000, ge=1)
    sdp_hierarchical_allgather: bool = True
    sdp_gradient_clipping: float = Field(default=1.0, ge=0.0)
    delayed_parameter_initialization: bool = False
    load_partition: bool = False
    partition_file: str | None = None
    ddp_port: int | None = Field(default=None, ge=0)
    ddp_dist_backend: Literal["auto", "nccl"] = "auto"

    @property
    def half_dtype(self) -> torch.dtype | None:
        """The parameter type of ``fp16`` or ``bf16``; None for the script's own."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are split over replicas."""
        return self.sharded_data_parallel_degree > 1

    @property
    def partitions(self) -> int:
        """The older name of ``pipeline_parallel_degree``."""
        return self.pipeline_parallel_degree

    @property
    def fixed_order(self) -> bool:
        """Whether all ranks of a stage take microbatches in one order, as those that share tensors must."""
        return self.deterministic_server or self.tensor_parallel_degree > 1

    @model_validator(mode="before")
    @classmethod
    def _none_is_the_default(cls, values: Any) -> Any:
        defaulted = ("active_microbatches", "memory_weight")
        return {name: value for name, value in values.items() if value is not None or name not in defaulted}

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse True as a number: to Python it is 1, but nobody means that by ``microbatches=True``."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in (int, float):
            raise ValueError("expected a number, not a truth value")
        return value

    @field_validator("auto", mode="before")
    @classmethod
    def _auto_names_a_model(cls, value: Any) -> Any:
        if value is True:
            raise ValueError(
                "groups of ranks are made before there is a model to choose for; name one, as in "
                '{"model": "my_package.models:build", "batch": 64}'
            )
        return value or None

    @field_validator("placement_strategy")
    @classmethod
    def _placement(cls, value: str) -> str:
        if value not in ("cluster", "spread") and sorted(value) != sorted("DPT"):
            raise ValueError("expected 'cluster', 'spread' or an order of the letters D, P and T")
        return value

    @model_validator(mode="after")
    def _contradictions(self) -> Config:
        if self.default_partition >= self.pipeline_parallel_degree:
            raise ValueError(
                f"default_partition={self.default_partition} must be less than the number of partitions, "
                f"{self.pipeline_parallel_degree}"
            )
        if not self.auto_partition and "default_partition" not in self.model_fields_set:
            raise ValueError("auto_partition=False needs default_partition, the place of unplaced modules")
        dependent = [name for name in _NEED_REPLICAS if self._asks(name)]
        if dependent and not self.ddp:
            raise ValueError(
                f"{' and '.join(dependent)} {'needs' if len(dependent) == 1 else 'need'} ddp=True"
            )
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are two types for the same parameters; set one of them")
        if self.shard_optimizer_state and self.shards_parameters:
            raise ValueError(
                "shard_optimizer_state and sharded_data_parallel_degree both share out the optimizer's "
                "state; set one of them (the latter shares out parameters and gradients, too)"
            )
        self._require_virtual_stages()
        self._require_movable()
        self._require_replicas()
        self._require_automatic()
        self._refuse_absent()
        return self

    def _require_virtual_stages(self) -> None:
        """Raise if the schedule does not support several stages per partition."""
        stages = self.virtual_stages
        if self.pipeline == "v" and stages != 2:
            raise ValueError(
                f"pipeline='v' gives every partition two stages, so virtual_stages={stages} is not possible"
            )
        if self.pipeline == "searched" and stages > 2:
            raise ValueError(
                f"pipeline='searched' is for one stage per partition, or for two that lie in a V, so "
                f"virtual_stages={stages} is not possible"
            )
        if self.pipeline not in ("v", "interleaved", "searched") and stages != 1:
            raise ValueError(
                f"virtual_stages={stages} needs pipeline='interleaved', 'v' or 'searched', and this is "
                f"{self.pipeline!r}"
            )

    def _require_movable(self) -> None:
        """Raise if parts of the model cannot move because something else keeps state of their parameters."""
        if not self.replan:
            return
        if not self.auto_partition:
            raise ValueError("replan=True needs auto_partition=True: places given by hand are kept")
        if hindering := [name for name in _HINDERS_MOVES if self._asks(name)]:
            raise ValueError(f"replan=True cannot be combined with {' and '.join(hindering)}")

    def _require_replicas(self) -> None:
        """Raise if ``elastic`` is impossible because a replica lacks something that others have."""
        if self.elastic is not None:
            hindering = [name for name in HINDERS_REPLICAS if self._asks(name)]
            require_replicas(hindering, ddp=self.ddp, pipeline=self.pipeline)

    def _require_automatic(self) -> None:
        """Raise if ``auto`` is combined with what cannot be predicted; only pipelines and replicas can."""
        if self.auto is None:
            return
        if hindering := [name for name in _HINDERS_AUTO if self._asks(name)]:
            raise ValueError(f"auto does not choose for {' and '.join(hindering)}")
        if "virtual_stages" in self.model_fields_set and self.pipeline != "v":
            raise ValueError("auto does not choose for virtual_stages; leave it out, or set pipeline='v'")

    def _asks(self, name: str) -> bool:
        """Whether a setting has an effect; a sharding degree of 0 or 1 has none."""
        value = getattr(self, name)
        if name == "sharded_data_parallel_degree" and value == 0:
            return False
        return bool(value != type(self).model_fields[name].default)

    def _refuse_absent(self) -> None:
        absent = [name for name in _ABSENT if self._asks(name)]
        if absent:
            settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in absent)
            nothing = ", ".join(f"{name}={type(self).model_fields[name].default!r}" for name in absent)
            verb, those = ("asks", "it") if len(absent) == 1 else ("each ask", "them")
            raise ValueError(
                f"{settings} {verb} for a feature of the original library that does not exist here; leave "
                f"{those} out, or set {nothing}"
            )

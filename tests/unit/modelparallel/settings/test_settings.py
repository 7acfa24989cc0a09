"""Settings of model parallelism: sources, every key, contradictions."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from opensmd.modelparallel.settings.config import Config
from opensmd.modelparallel.settings.sources import load_config, parse_pairs


def load(
    given: dict[str, Any] | None = None, *, launcher: Any = None, arguments: tuple[str, ...] = ()
) -> Config:
    environ = {} if launcher is None else {"SM_HP_MP_PARAMETERS": json.dumps(launcher)}
    return load_config(given, environ=environ, arguments=arguments)


def test_nothing_given_means_one_partition_with_the_documented_defaults() -> None:
    config = load()
    assert (config.partitions, config.microbatches, config.pipeline) == (1, 1, "interleaved")
    assert (config.optimize, config.memory_weight, config.active_microbatches) == ("memory", 0.8, 3)
    assert (config.placement_strategy, config.auto_partition, config.default_partition) == (
        "cluster",
        True,
        0,
    )
    assert not (config.ddp or config.fp16 or config.prescaled_batch or config.shard_optimizer_state)


def test_the_launcher_wins_over_the_dict_and_the_command_line_over_both() -> None:
    config = load(
        {"partitions": 1, "microbatches": 2, "pipeline": "simple"},
        launcher={"partitions": 2, "microbatches": 4},
        arguments=("--lr", "1", "--mp_parameters", "microbatches=8,ddp=True"),
    )
    assert (config.partitions, config.microbatches, config.pipeline, config.ddp) == (2, 8, "simple", True)
    joined = load(arguments=("--mp_parameters=partitions=2,optimize=speed",))
    assert (joined.partitions, joined.memory_weight, joined.active_microbatches) == (2, 0.2, 4)


def test_pairs_of_the_command_line_keep_their_types() -> None:
    read = parse_pairs("partitions=2, ddp=True,optimize=speed,memory_weight=0.3,auto_partition=false")
    assert read == {
        "partitions": 2,
        "ddp": True,
        "optimize": "speed",
        "memory_weight": 0.3,
        "auto_partition": False,
    }


@pytest.mark.parametrize("given", [2, "2", 2.0])
def test_defaults_follow_the_settings_also_where_these_are_texts(given: Any) -> None:
    assert load({"partitions": given}) == load({"partitions": 2})
    assert load(launcher={"pipeline_parallel_degree": given, "partitions": 2}).active_microbatches == 4
    assert (
        load({"partitions": given, "active_microbatches": None, "memory_weight": None}).memory_weight == 0.8
    )


def test_the_command_line_may_give_one_json_object() -> None:
    config = load(arguments=("--mp_parameters", '{"partitions": 2, "ddp": true}'))
    assert (config.partitions, config.ddp) == (2, True)
    with pytest.raises(ValueError, match=r"--mp_parameters='{\"partitions\": 2' is not JSON"):
        load(arguments=("--mp_parameters", '{"partitions": 2'))


def test_the_dict_and_the_launcher_may_use_different_names_of_the_number_of_partitions() -> None:
    assert load({"pipeline_parallel_degree": 4}, launcher={"partitions": 2}).partitions == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"partition": 2},
            r"unknown .* partition \(did you mean partitions\?\). The valid ones are: .*optimize",
        ),
        ({"zero": 2}, r"unknown modelparallel parameters: zero. The valid ones are: .*partitions"),
        ({"partitions": 0}, "partitions=0"),
        ({1: 2}, "unknown modelparallel parameters: 1. The valid ones are"),
        ({"partitions": "two"}, r"partitions='two': Input should be a valid integer, [^;]*$"),
        ({"optimize": "Speed"}, r"optimize='Speed': Input should be 'memory' or 'speed'$"),
        ({"microbatches": True}, "microbatches=True: expected a number, not a truth value"),
        ({"memory_weight": True}, "memory_weight=True: expected a number"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"active_microbatches": 0}, "active_microbatches=0"),
        ({"pipeline": "gpipe"}, "pipeline='gpipe'.*interleaved"),
        ({"pipeline": "v", "virtual_stages": 3}, "pipeline='v' gives every partition two"),
        (
            {"replan": True, "auto_partition": False, "default_partition": 0},
            "replan=True needs auto_partition",
        ),
        ({"auto": True}, "groups of ranks are made before there is a model"),
        ({"auto": {"model": "a:b", "batch": 8}, "shard_optimizer_state": True}, "auto does not choose for"),
        (
            {"auto": {"model": "a:b", "batch": 8}, "virtual_stages": 2},
            "auto does not choose for virtual_stages; leave it out, or set pipeline='v'",
        ),
        ({"replan": True, "bf16": True}, "replan=True cannot be combined with bf16"),
        ({"pipeline": "simple", "virtual_stages": 2}, "virtual_stages=2 needs pipeline='interleaved', 'v'"),
        (
            {"pipeline": "searched", "virtual_stages": 3},
            "'searched' is for one stage per partition, or for two",
        ),
        ({"optimize": "cost"}, "optimize='cost'.*memory"),
        ({"memory_weight": 1.5}, "memory_weight=1.5"),
        ({"placement_strategy": "DPD"}, "placement_strategy='DPD': expected 'cluster'"),
        ({"partitions": 2, "default_partition": 2}, "default_partition=2 must be less than"),
        ({"auto_partition": False}, "auto_partition=False needs default_partition"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "two names of one setting"),
        ({"ddp_port": 1}, "ddp_port needs ddp=True"),
        ({"ddp_dist_backend": "nccl"}, "ddp_dist_backend needs ddp=True"),
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree needs ddp=True"),
        ({"tensor_parallel_degree": 0, "ddp": True}, "tensor_parallel_degree=0"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are two types for the same parameters"),
        (
            {"shard_optimizer_state": True, "sharded_data_parallel_degree": 2, "ddp": True},
            "shard_optimizer_state and sharded_data_parallel_degree both share out",
        ),
        ({"sharded_data_parallel_degree": 2}, "sharded_data_parallel_degree needs ddp=True"),
        ({"offload_activations": True, "activation_loading_horizon": 0}, "activation_loading_horizon=0"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(given)


def test_settings_that_are_no_dict_are_refused() -> None:
    with pytest.raises(TypeError, match=r"smp\.init: expected a dict of modelparallel parameters, got 2"):
        load(2)  # type: ignore[arg-type]


def test_a_launcher_value_that_is_no_json_object_is_refused() -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        load_config(environ={"SM_HP_MP_PARAMETERS": "{partitions"}, arguments=())
    with pytest.raises(ValueError, match="expected a JSON object"):
        load_config(environ={"SM_HP_MP_PARAMETERS": "[2]"}, arguments=())
    with pytest.raises(ValueError, match="expected key=value"):
        load(arguments=("--mp_parameters", "partitions:2"))


def test_undocumented_keys_of_notebooks_warn_and_are_ignored() -> None:
    names = ["static_mode", "fast_mode", "overlapping_allreduce", "checkpoint_attentions", "_match_weights"]
    names += ["_fp32_grad_accumulation", "use_times", "xla"]
    for name in names:
        with pytest.warns(UserWarning, match=f"'{name}' is undocumented and ignored"):
            load({name: name != "overlapping_allreduce"})
    for name in ("horovod", "contiguous"):
        with pytest.warns(UserWarning, match=f"'{name}' is for TensorFlow alone and ignored"):
            load({name: name == "horovod"})


def test_defaults_of_features_that_are_off_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for off in (False, "false", None):
            load({"horovod": off, "static_mode": off, "fast_mode": off, "xla": off, "contiguous": True})
        load({"overlapping_allreduce": True, "sdp_gradient_clipping": 1.0})
        load({"ddp": False, "ddp_port": None, "ddp_dist_backend": "auto"})
        for degree in (0, 1, "0"):
            load({"sharded_data_parallel_degree": degree})


def test_all_settings_that_do_not_exist_here_are_named_at_once() -> None:
    with pytest.raises(ValueError, match="does not exist here") as refused:
        load({"load_partition": True, "partition_file": "plan.json"})
    for part in ("load_partition=True", "partition_file='plan.json'", "leave them out"):
        assert part in str(refused.value)
    with pytest.raises(ValueError, match="ddp_port and ddp_dist_backend need ddp=True"):
        load({"ddp_port": 1, "ddp_dist_backend": "nccl"})


def test_keys_without_effect_warn_only_when_they_ask_for_something() -> None:
    with pytest.warns(UserWarning, match="ddp_port=4711 has no effect here"):
        load({"ddp_port": 4711, "ddp": True})
    with pytest.warns(UserWarning, match="sdp_max_live_parameters=5 has no effect without sharded"):
        load({"sdp_max_live_parameters": 5})
    with pytest.warns(UserWarning, match="sdp_hierarchical_allgather=False has no effect here"):
        load({"sdp_hierarchical_allgather": False, "sharded_data_parallel_degree": 2, "ddp": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load({"sdp_max_live_parameters": 5, "sharded_data_parallel_degree": 2, "ddp": True})
        load(
            {
                "ddp_port": None,
                "sdp_hierarchical_allgather": True,
                "fp16": False,
            }
        )


def test_ranks_that_share_tensors_take_microbatches_in_one_order() -> None:
    config = load({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "skip_tracing": "true"})
    assert config.fixed_order and not config.deterministic_server
    assert config.prescaled_batch and config.skip_tracing
    assert not load({"ddp": True}).fixed_order

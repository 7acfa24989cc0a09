"""What scripts of later versions ask of the packages that they import."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPNotInitializedError, SMPUnsupportedError
from smdistributed.modelparallel.test.torch import utils as test_utils
from smdistributed.modelparallel.torch import utils


@pytest.mark.parametrize("family", ["bert", "gpt2", "gptj", "gptneo", "roberta"])
def test_translations_leave_names_alone_that_they_do_not_know(family: str) -> None:
    module = importlib.import_module(f"smdistributed.modelparallel.torch.nn.huggingface.{family}")
    assert getattr(smp.nn.huggingface, family) is module
    given = nn.Linear(2, 2).state_dict()
    to_hf = getattr(module, f"translate_state_dict_to_hf_{family}")
    from_hf = getattr(module, f"translate_hf_state_dict_to_smdistributed_{family}")
    for found in (to_hf(given), to_hf(given, max_seq_len=5), from_hf(given)):
        assert dict(found) == dict(given) and found is not given
    for name in module.__all__:
        assert dict(getattr(module, name)(given)) == dict(given)


def test_helpers_of_the_originals_tests_say_why_they_do_not_exist() -> None:
    for name in ("verify", "dump_model"):
        with pytest.raises(SMPUnsupportedError, match=rf"{name}: .*compare model\.state_dict"):
            getattr(test_utils, name)("anything", key=1)


def test_messages_carry_the_rank(initialised: None) -> None:
    assert utils.rmsg("hello") == "[0] hello"
    smp.shutdown()
    with pytest.raises(SMPNotInitializedError, match="rmsg needs"):
        utils.rmsg("hello")


def test_before_a_model_is_wrapped_no_parameter_is_split() -> None:
    assert utils.get_distribution_axis(nn.Parameter(torch.zeros(2, 2))) is None


TORCH = "smdistributed.modelparallel.torch"
LATER_NAMES = {
    TORCH: "tp_rank tp_size pp_rank pp_size rdp_rank rdp_size get_tp_group get_pp_group get_rdp_group "
    "get_tp_process_group get_pp_process_group get_rdp_process_group PP_GROUP TP_GROUP RDP_GROUP "
    "set_partition save_checkpoint resume_from_checkpoint tensor_parallelism set_tensor_parallelism "
    "tp_register tp_register_with_module set_activation_checkpointing model_creation "
    "delay_param_initialization state",
    f"{TORCH}.nn": "DistributedLinear DistributedTransformerLMHead DistributedTransformer "
    "DistributedTransformerLayer DistributedAttentionLayer DistributedTransformerOutputLayer "
    "DistributedEmbedding DistributedModule FlashAttentionLayer huggingface utils",
    f"{TORCH}.nn.huggingface.gptj": "translate_hf_gptj_state_dict_to_smdistributed",
    f"{TORCH}.optimizers": "FusedNovoGrad FusedLamb FusedLAMB FusedAdam",
    f"{TORCH}.state_mod": "state",
    f"{TORCH}.utils": "rmsg get_distribution_axis",
    f"{TORCH}.patches.checkpoint": "checkpoint checkpoint_sequential",
    f"{TORCH}.sharded_data_parallel_checkpoint": "get_full_state_dict_from_sharded_data_parallel_checkpoint",
    f"{TORCH}.exceptions": "__all__",
    "smdistributed.modelparallel.backend.exceptions": "__all__",
    "smdistributed.modelparallel": "__version__",
    "smdistributed.dataparallel.exceptions": "SMDDPError",
}
ARGUMENTS = {
    "save": "v3",
    "load": "map_location pickle_module partial back_compat",
    "save_checkpoint": "path tag partial model optimizer user_content translate_if_full "
    "num_kept_partial_checkpoints",
    "resume_from_checkpoint": "path tag partial strict load_optimizer load_sharded_optimizer_state "
    "translate_function",
    "checkpoint_sequential": "sequential_module input strategy preserve_rng_state pack_args_as_tuple",
    "set_activation_checkpointing": "module preserve_rng_state pack_args_as_tuple strategy",
}
OF_A_MODEL = """distributed_modules is_distributed_parameter is_distributed_buffer is_scaled_batch_parameter
is_scaled_batch_buffer default_reducer_named_parameters scaled_batch_reducer_named_parameters get_module
register_post_step_hook register_comm_hook orig_state_dict join cpu"""
OF_AN_OPTIMIZER = """local_state_dict clip_master_grads optimizer overflow loss_scaler loss_scale
master_params update_master_grads init_master_params reload_model_params fp16_groups fp32_from_fp16_groups
fp32_from_fp32_groups backward"""


def test_no_name_of_later_versions_is_absent(initialised: None) -> None:
    for module, names in LATER_NAMES.items():
        assert all(hasattr(importlib.import_module(module), name) for name in names.split()), module
    for function, arguments in ARGUMENTS.items():
        assert set(arguments.split()) <= inspect.signature(getattr(smp, function)).parameters.keys()
    model = smp.DistributedModel(nn.Linear(2, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    assert not [name for name in OF_A_MODEL.split() if not hasattr(model, name)]
    assert not [name for name in OF_AN_OPTIMIZER.split() if not hasattr(optimizer, name)]
    assert optimizer.fp16_groups == optimizer.fp32_from_fp16_groups == [[]]
    assert optimizer.fp32_from_fp32_groups == [list(model.parameters())]
    for name in ("fp16", "bf16", "prescaled_batch", "shard_optimizer_state"):
        assert getattr(smp.state.cfg, name) is False
    assert smp.state.module_manager.translate_functions == []
    with (
        pytest.raises(TypeError, match="unexpected keywords flash_atention"),
        smp.model_creation(flash_atention=True),
    ):
        pass

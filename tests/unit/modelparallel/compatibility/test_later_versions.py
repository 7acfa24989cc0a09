"""Names of later versions say why they do not work."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from opensmd.modelparallel.compatibility import later_versions
from opensmd.modelparallel.exceptions import SMPUnsupportedError


def test_names_of_later_versions_say_why_they_do_not_work() -> None:
    for name in later_versions.__all__:
        if name.startswith("Distributed"):
            with pytest.raises(SMPUnsupportedError, match=f"{name}: tensor parallelism does not"):
                getattr(later_versions, name)(1, 2)
    with pytest.raises(SMPUnsupportedError, match="scaled_dot_product_attention"):
        later_versions.FlashAttentionLayer()
    with pytest.raises(SMPUnsupportedError, match="tensor parallelism"), later_versions.tensor_parallelism():
        pass
    with pytest.raises(SMPUnsupportedError, match="tensor parallelism"):
        later_versions.set_tensor_parallelism(nn.Linear(1, 1))
    for register in (later_versions.tp_register, later_versions.tp_register_with_module):
        with pytest.raises(SMPUnsupportedError, match="tensor parallelism"):
            register(nn.Linear)
    with pytest.raises(SMPUnsupportedError), later_versions.model_creation(tensor_parallelism=True):
        pass


def test_misspelt_keywords_of_model_creation_are_named() -> None:
    with (
        pytest.raises(TypeError, match=r"unexpected keywords flash_atention; .*flash_attention"),
        later_versions.model_creation(flash_atention=True),
    ):
        pass
    with later_versions.model_creation(zero_init=False, flash_attention=True, fused_softmax=True):
        pass


def test_later_features_that_are_left_off_do_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with later_versions.tensor_parallelism(enabled=False, fused_softmax=True):
            later_versions.set_tensor_parallelism(nn.Linear(1, 1), False)
        with later_versions.delay_param_initialization(enabled=False):
            pass
        with later_versions.model_creation(dtype=torch.float64):
            assert nn.Linear(1, 1).weight.dtype == torch.float64
        assert nn.Linear(1, 1).weight.dtype == torch.float32
    with pytest.warns(UserWarning, match="has no effect"), later_versions.delay_param_initialization():
        pass

"""Creating models as scripts of later versions do."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from opensmd.modelparallel.compatibility import later_versions


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
        with later_versions.delay_param_initialization(enabled=False):
            pass
        with later_versions.model_creation(dtype=torch.float64):
            assert nn.Linear(1, 1).weight.dtype == torch.float64
        assert nn.Linear(1, 1).weight.dtype == torch.float32
    with pytest.warns(UserWarning, match="has no effect"), later_versions.delay_param_initialization():
        pass

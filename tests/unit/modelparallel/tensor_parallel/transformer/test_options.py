"""Settings of transformer layers: what they mean, and which are refused or warn."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from opensmd.modelparallel.tensor_parallel.transformer.options import (
    EXTRA_OPTIONS,
    activation_of,
    layer_options,
)
from opensmd.said_once import warn_once


def test_a_layer_is_causal_with_a_mask_and_has_its_own_first_values_if_asked() -> None:
    plain, other = layer_options("L"), layer_options("L", causal_mask_size=8, use_normal_initialization=True)
    assert (plain.causal, plain.std) == (False, None) and (other.causal, other.std) == (True, 0.02)


def test_the_documented_settings_end_where_later_ones_begin() -> None:
    assert "post_layernorm" not in EXTRA_OPTIONS and "attention_in_fp32" in EXTRA_OPTIONS


def test_unknown_settings_and_layers_without_normalisation_are_refused() -> None:
    with pytest.raises(TypeError, match=r"smp\.nn\.L takes no speed, wings; .*fused_softmax"):
        layer_options("L", wings=2, speed=1)
    with pytest.raises(ValueError, match="at least one of pre_layernorm and post_layernorm"):
        layer_options("L", post_layernorm=False)
    assert layer_options("L", post_layernorm=False, parallel_residual=True).parallel_residual


def test_a_setting_without_effect_warns(recwarn: pytest.WarningsRecorder) -> None:
    warn_once.cache_clear()  # another test may have been told
    layer_options("L")
    assert not [each for each in recwarn if each.category is UserWarning]
    with pytest.warns(UserWarning, match="fused_dropout=True has no effect"):
        layer_options("L", fused_dropout=True)


def test_activations_are_those_of_their_names() -> None:
    x = torch.linspace(-3, 3, 7)
    assert torch.equal(activation_of("gelu")(x), F.gelu(x))
    assert torch.equal(activation_of("gelu_new")(x), F.gelu(x, approximate="tanh"))
    with pytest.raises(ValueError, match="activation='sine' is unknown; expected one of gelu, "):
        activation_of("sine")

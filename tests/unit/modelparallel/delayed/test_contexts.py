"""Creating models as later scripts do: keywords, and values as without delay for any initializer."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.delayed import contexts
from opensmd.modelparallel.delayed.delayed_parameter import DelayedParameter, DelayedParameters
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.said_once import warn_once


def test_misspelt_keywords_of_model_creation_are_named() -> None:
    with (
        pytest.raises(TypeError, match=r"unexpected keywords flash_atention; .*flash_attention"),
        contexts.model_creation(flash_atention=True),
    ):
        pass
    with contexts.model_creation(zero_init=False, flash_attention=True, gather_logits=True):
        pass
    with (
        pytest.raises(TypeError, match=r"dtype='float16' is no torch\.dtype, such as torch\.float16"),
        contexts.model_creation(dtype="float16"),  # type: ignore[arg-type]
    ):
        pass
    warn_once.cache_clear()
    with (
        pytest.warns(UserWarning, match="zero_init=True has no effect"),
        contexts.model_creation(zero_init=True),
    ):
        pass


def test_later_features_that_are_left_off_do_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contexts.delay_param_initialization(enabled=False):
            assert not isinstance(nn.Linear(64, 64).weight, DelayedParameter)
        with contexts.model_creation(dtype=torch.float64):
            assert nn.Linear(1, 1).weight.dtype == torch.float64
        assert nn.Linear(1, 1).weight.dtype == torch.float32


class Odd(nn.Module):
    """Parameters that come about in other ways than by a constructor of torch."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(64, 64) * 0.1 + torch.eye(64))
        self.given = nn.Parameter(torch.linspace(0, 1, 4096).view(64, 64).clone())
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 2048)][:3]
        self.register_buffer("steps", torch.rand(2000))
        self.same_steps = self.steps
        self.small, self.large = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(64, 64))
        self.small.data, self.large.data = self.scaled[0, :2] * 2, torch.ones(3)
        nn.init.orthogonal_(self.given)
        with torch.no_grad():
            self.scaled[3, 5:9] = 7
            self.given[::2].normal_(generator=torch.Generator().manual_seed(5))
            if self.scaled.abs().max() > 2:
                self.scaled.clamp_(-2, 2)


def build() -> nn.Module:
    encoder = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    layers = [
        nn.Linear(64, 64),
        nn.LSTM(64, 64),
        nn.Embedding(100, 64, padding_idx=3),
        nn.Conv2d(32, 64, 5),
        nn.utils.spectral_norm(nn.Linear(64, 64)),
        nn.TransformerEncoder(encoder, 2),
        Odd(),
        nn.Linear(64, 64),
    ]
    layers.append(copy.deepcopy(layers[0]))
    layers[-2].weight = layers[0].weight
    for module in nn.Sequential(*layers).modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight.data, std=0.02, a=-0.02, b=0.02)
    return nn.Sequential(*layers)


def test_delayed_parameters_get_bitwise_the_values_that_initializers_give_without_delay() -> None:
    torch.manual_seed(0)
    plain, drawn = build(), torch.rand(3)
    torch.manual_seed(0)
    with contexts.delay_param_initialization():
        delayed = build()
    assert torch.equal(torch.rand(3), drawn)
    large = [each for each in plain.parameters() if each.nbytes >= 4096]
    # without the one that spectral_norm keeps another view of, with the small one made of a large one
    assert sum(isinstance(each, DelayedParameter) for each in delayed.parameters()) == len(large) > 15
    objects = [id(each) for each in delayed.parameters()]
    DelayedParameters(delayed).fill(lambda parameter: True)
    assert [id(each) for each in delayed.parameters()] == objects
    state = delayed.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    assert delayed[6].rates == plain[6].rates
    assert delayed[6].same_steps is delayed[6].steps


def test_the_innermost_context_says_whether_parameters_are_delayed() -> None:
    with contexts.delay_param_initialization():
        with contexts.delay_param_initialization(enabled=False):
            now = nn.Linear(64, 64)
        later = nn.Linear(64, 64)
    assert not isinstance(now.weight, DelayedParameter)
    assert isinstance(later.weight, DelayedParameter)
    with pytest.raises(SMPUnsupportedError, match="initialization is delayed until the first call"):
        copy.deepcopy(later)  # by way of ``data``

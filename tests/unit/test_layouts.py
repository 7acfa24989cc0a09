"""What scripts of later versions ask about layouts, and original forwards of modules that extend others."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPError, SMPNotInitializedError, SMPUnsupportedError
from smdistributed.modelparallel.test.torch import utils as test_utils
from smdistributed.modelparallel.torch import utils
from smdistributed.modelparallel.torch.state_mod import state


@pytest.fixture
def initialised() -> Iterator[None]:
    with mock.patch.dict(os.environ):  # smp.init tells this process that it is a group of one
        smp.init({"partitions": 1})
        yield
        smp.shutdown()


@pytest.mark.parametrize("family", ["bert", "gpt2", "gptj", "gptneo", "roberta"])
def test_state_dicts_are_translated_to_themselves(family: str) -> None:
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


def test_no_parameter_is_split_along_an_axis() -> None:
    assert utils.get_distribution_axis(nn.Parameter(torch.zeros(2, 2))) is None


def test_parameters_have_names_and_numbers_once_there_is_an_optimizer(initialised: None) -> None:
    with pytest.raises(SMPError, match=r"once smp\.DistributedOptimizer"):
        _ = state.param_index_to_name_tp_group
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    backwards = list(module.parameters())[::-1]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(backwards[:1], lr=0.1))
    optimizer.add_param_group({"params": backwards[1:]})
    with pytest.raises(SMPError, match=r"once smp\.DistributedModel"):
        _ = state.param_index_to_name_tp_group
    model = smp.DistributedModel(module)

    @smp.step
    def step(x: Tensor) -> None:
        model(x)

    for _ in range(2):  # before and after the first step
        assert state.param_index_to_name_tp_group == [{0: "1.weight", 1: "0.bias", 2: "0.weight"}]
        assert state.param_name_to_index_tp_group == [{"1.weight": 0, "0.bias": 1, "0.weight": 2}]
        step(torch.ones(1, 2))


class Extended(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super()._orig_forward(x) + 1  # type: ignore[misc]
        return out


class Twice(Extended):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 2 * super()._orig_forward(x)  # type: ignore[misc]
        return out


def test_a_module_can_call_the_original_forward_of_the_class_it_extends(initialised: None) -> None:
    plain, module = nn.Linear(2, 2), nn.Sequential(Twice(2, 2))
    module[0].load_state_dict(plain.state_dict())
    model = smp.DistributedModel(module)

    @smp.step
    def step(x: Tensor) -> Tensor:
        return model(x)  # type: ignore[no-any-return]

    x = torch.ones(1, 2)
    assert torch.equal(step(x).concat(), 2 * (plain(x).detach() + 1))

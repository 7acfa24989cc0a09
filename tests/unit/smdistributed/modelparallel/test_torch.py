"""What scripts of later versions ask of the packages that they import."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPNotInitializedError, SMPUnsupportedError
from smdistributed.modelparallel.test.torch import utils as test_utils
from smdistributed.modelparallel.torch import utils


@pytest.fixture
def initialised() -> Iterator[None]:
    with mock.patch.dict(os.environ):  # smp.init tells this process that it is a group of one
        smp.init({"partitions": 1})
        yield
        smp.shutdown()


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

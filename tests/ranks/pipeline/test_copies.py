"""A split model is neither copied nor pickled, and says what to do instead; its module is, once whole."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools
from tests.support.ranks import ROOT

WAYS: dict[str, Callable[[Any], object]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda model: torch.save(model, io.BytesIO()),
    "average": AveragedModel,
}
SAYS = (
    "a DistributedModel that is split over pipeline ranks can be neither copied nor pickled",
    "Save model.state_dict(), which all ranks call, or use smp.save_checkpoint",
    "let each rank average those of model.local_named_parameters()",
)


def wrapped() -> Any:
    """A model that its first step splits over two ranks."""
    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    smp.set_partition(module[2], 1)
    return smp.DistributedModel(module)


def trained() -> Any:
    """Such a model after a step."""
    model = wrapped()

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    step(torch.ones(4, 4))
    return model


def refused(way: str) -> str:
    model = trained()
    with pytest.raises(RuntimeError) as raised:
        WAYS[way](model)
    smp.shutdown()
    return str(raised.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_split_model_says_what_to_do_instead_of_copying_it(pool: Pools, way: str) -> None:
    for text in pool(2).run(refused, way):
        assert all(says in text for says in SAYS)


def refused_before_the_first_step(way: str) -> str:
    model = wrapped()
    with pytest.raises(RuntimeError) as raised:
        WAYS[way](model)
    copy.deepcopy(model.get_module())
    smp.shutdown()
    return str(raised.value)


@pytest.mark.parametrize("way", WAYS)
def test_before_its_first_step_such_a_model_says_to_copy_its_module(pool: Pools, way: str) -> None:
    for text in pool(2).run(refused_before_the_first_step, way):
        assert "Before the first step, copy model.get_module()" in text


def averaged_in_one_partition() -> bool:
    smp.shutdown()
    smp.init({"partitions": 1, "microbatches": 2})
    model = smp.DistributedModel(nn.Linear(4, 2))
    average = AveragedModel(model)
    average.update_parameters(model)
    smp.shutdown()
    return torch.equal(average.module.module.weight, model.get_module().weight)


def test_a_model_in_one_partition_is_averaged_as_any_other(pool: Pools) -> None:
    assert pool(1).run(averaged_in_one_partition) == [True]


def test_the_page_of_restrictions_has_the_message() -> None:
    page = " ".join((ROOT / "docs" / "restrictions.md").read_text().split()).replace("> ", "")
    assert all(says in page for says in SAYS)


def copied_once_it_is_whole() -> bool:
    model = trained()
    model.cpu()
    copies = copy.deepcopy(model.get_module()).state_dict(), model.get_module().state_dict()
    smp.shutdown()
    return all(torch.equal(copies[0][name], values) for name, values in copies[1].items())


def test_a_model_that_is_whole_again_can_be_copied(pool: Pools) -> None:
    assert pool(2).run(copied_once_it_is_whole) == [True, True]

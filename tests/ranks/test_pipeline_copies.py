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


def trained() -> Any:
    """A model that is split over two ranks, after a step."""
    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    smp.set_partition(module[2], 1)
    model = smp.DistributedModel(module)

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

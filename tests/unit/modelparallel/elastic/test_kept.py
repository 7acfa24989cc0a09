"""What a step keeps so that it can be done again."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from opensmd.modelparallel.elastic.kept import KeptStep
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder


class OnOneRank:
    """A model all of whose parts are on this rank."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def get_module(self) -> nn.Module:
        return self._module

    def is_here(self, name: str) -> bool:
        return True


def test_a_model_that_is_not_on_the_cpu_is_refused() -> None:
    model = OnOneRank(nn.Linear(2, 2, device="meta"))
    with pytest.raises(SMPError, match=r"weight is on meta.*only for models on the CPU.*from checkpoints"):
        KeptStep(cast("Any", model))


def test_a_buffer_that_another_rank_has_computed_is_kept_without_its_data() -> None:
    module, computed = nn.BatchNorm1d(2), Placeholder.of_form([2], None, torch.float32, torch.device("cpu"))
    module.running_mean = computed
    kept = KeptStep(cast("Any", OnOneRank(module)))
    module.running_mean, module.running_var = torch.ones(2), torch.zeros(2)
    kept.put_back()
    assert module.running_mean is computed
    assert module.running_var is not None
    assert module.running_var.tolist() == [1.0, 1.0]

"""What a step keeps so that it can be done again."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch import nn

from opensmd.modelparallel.elastic.kept import KeptStep
from opensmd.modelparallel.exceptions import SMPError


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

"""A dry run leaves the model as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.restoring import untouched


class Keeping(nn.Linear):
    """Has attributes, a container, and a buffer."""

    mean: Tensor
    loss: Any

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.losses: list[Any] = []
        self.count = 0


def test_a_dry_run_leaves_containers_in_containers_and_their_order_as_they_were() -> None:
    module = Keeping()
    module.losses = [1, {"a": [2]}]
    names = list(module._parameters)
    with untouched(module, None):
        module.losses[1]["a"].append(3)
        module.losses.append(4)
        weight = module._parameters.pop("weight")
        module._parameters["weight"] = weight
        module.mean += 1
    assert module.losses == [1, {"a": [2]}] and list(module._parameters) == names
    assert module.mean.sum() == 0

"""A dry run leaves the model as it was."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from opensmd.modelparallel.dry_run.restoring import untouched
from tests.unit.modelparallel.keeping import Keeping


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


def test_objects_with_tensors_at_modules_and_parameters_are_as_they_were() -> None:
    module = Keeping()
    scale = torch.ones(1)
    module.losses = SimpleNamespace(scale=scale, nested=True)
    module.weight.scales = SimpleNamespace(scale=scale)
    with untouched(module, None):
        module.losses.scale = torch.zeros(1)
        del module.losses.nested
        module.weight.scales.scale = torch.zeros(1)
    assert vars(module.losses) == {"scale": scale, "nested": True}
    assert module.weight.scales.scale is scale


class Meter:
    """An object of a script, in which methods of others count."""

    __slots__ = ("__dict__", "total")

    def __init__(self) -> None:
        self.total, self.kept = 0, [0]

    def update(self) -> None:
        self.total += 1
        self.kept.append(self.total)
        self.latest = self.total


def test_ordinary_objects_are_as_they_were_wherever_an_attribute_leads_to_them() -> None:
    inside, bound, enclosed = meters = [Meter() for _ in range(3)]
    module = Keeping()
    module.losses = {
        "nested": SimpleNamespace(meter=inside),
        "hooks": [bound.update, lambda: enclosed.update()],
    }
    with untouched(module, None):
        for meter in meters:
            meter.update()
    assert [(meter.total, vars(meter)) for meter in meters] == [(0, {"kept": [0]})] * 3


def test_a_buffer_that_a_dry_run_has_resized_has_its_size_again() -> None:
    module = Keeping()
    with untouched(module, None):
        module.mean.resize_(5)
    assert module.mean.tolist() == [0, 0]


def test_generators_of_the_model_go_on_as_if_there_had_been_no_dry_run() -> None:
    def made() -> list[Any]:
        of_numpy = [numpy.random.default_rng(1), numpy.random.RandomState(2)]
        return [torch.Generator().manual_seed(3), {"skips": random.Random(4), "noise": of_numpy}]

    def drawn(own: Any) -> list[float]:
        inside = own[1]
        return [
            float(torch.rand(1, generator=own[0])),
            inside["skips"].random(),
            *(float(each.random()) for each in inside["noise"]),
        ]

    module = Keeping()
    module.losses = made()
    with untouched(module, None):
        drawn(module.losses)
    assert drawn(module.losses) == drawn(made())

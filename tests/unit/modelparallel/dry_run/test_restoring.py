"""A dry run leaves the model as it was."""

from __future__ import annotations

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


def test_a_buffer_that_a_dry_run_has_resized_has_its_size_again() -> None:
    module = Keeping()
    with untouched(module, None):
        module.mean.resize_(5)
    assert module.mean.tolist() == [0, 0]

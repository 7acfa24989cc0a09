"""Places given by hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from opensmd.modelparallel.manual_partition import fixed_places, partition, set_partition
from opensmd.modelparallel.settings.config import Config
from opensmd.modelparallel.state import state


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Model(nn.Module):
    """The example of SageMaker's documentation."""

    def __init__(self) -> None:
        super().__init__()
        with partition(1):
            self.child0 = Child()
            with partition(2):
                self.child1 = Child()
            self.child2 = Child()
        self.child3 = Child()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def use(**given: Any) -> None:
        cfg = Config(pipeline_parallel_degree=3, **given)
        monkeypatch.setattr(state, "_initialised", SimpleNamespace(cfg=cfg))

    yield use


def test_the_documented_example_is_placed_as_its_comments_say(settings: Any) -> None:
    settings(auto_partition=False, default_partition=0)
    places = fixed_places(Model())
    assert places == {
        "": 0,
        "child0": 1,
        "child0.inner": 1,
        "child1": 2,
        "child1.inner": 2,
        "child2": 1,
        "child2.inner": 1,
        "child3": 0,
        "child3.inner": 0,
    }


def test_a_module_created_outside_keeps_the_default_even_below_a_placed_one(settings: Any) -> None:
    settings(auto_partition=False, default_partition=2)
    outside = nn.Linear(2, 2)
    with partition(1):
        box = nn.Sequential(outside, nn.Linear(2, 2))
    assert fixed_places(box) == {"": 1, "0": 2, "1": 1}


def test_set_partition_places_an_existing_module_and_all_below_it(settings: Any) -> None:
    settings(auto_partition=False, default_partition=0)
    model = Model()
    set_partition(model.child3, 2)
    set_partition(model.child0, 0)
    places = fixed_places(model)
    assert (places["child3"], places["child3.inner"], places["child0.inner"]) == (2, 2, 0)


def test_with_auto_partition_contexts_are_ignored_but_set_partition_counts(
    settings: Any,
) -> None:
    settings()
    model = Model()
    set_partition(model.child3, 2)
    with pytest.warns(UserWarning, match="contexts are ignored because auto_partition is True"):
        assert fixed_places(model) == {"child3": 2}


def test_torchs_constructor_is_back_after_the_contexts(settings: Any) -> None:
    settings(auto_partition=False, default_partition=0)
    before = nn.Module.__init__
    with pytest.raises(KeyError), partition(1), partition(2):
        raise KeyError
    assert nn.Module.__init__ is before
    assert fixed_places(nn.Linear(2, 2)) == {"": 0}


def test_partitions_that_do_not_exist_are_refused(settings: Any) -> None:
    settings()
    with (
        pytest.raises(ValueError, match=r"index=3 is not a partition; there are 3, numbered from 0"),
        partition(3),
    ):
        pass
    with pytest.raises(ValueError, match="index=-1"):
        set_partition(nn.Linear(1, 1), -1)
    with pytest.raises(TypeError, match="must be an int"):
        set_partition(nn.Linear(1, 1), "1")  # type: ignore[arg-type]

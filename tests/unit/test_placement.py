"""Places given by hand, and names of later versions that say why they do not work."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from opensmd.modelparallel.activation_checkpointing import (
    checkpoint,
    checkpoint_sequential,
    set_activation_checkpointing,
)
from opensmd.modelparallel.compatibility import later_versions
from opensmd.modelparallel.config import Config
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.manual_partition import fixed_places, partition, set_partition
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
        monkeypatch.setattr(state, "_cfg", Config(pipeline_parallel_degree=3, **given))

    yield use


def test_the_seeds_example_is_placed_as_its_comments_say(settings: Any) -> None:
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


def test_names_of_later_versions_say_why_they_do_not_work() -> None:
    for name in later_versions.__all__:
        if name.startswith("Distributed"):
            with pytest.raises(SMPUnsupportedError, match=f"{name}: tensor parallelism does not"):
                getattr(later_versions, name)(1, 2)
    with pytest.raises(SMPUnsupportedError, match="scaled_dot_product_attention"):
        later_versions.FlashAttentionLayer()
    with pytest.raises(SMPUnsupportedError, match="tensor parallelism"), later_versions.tensor_parallelism():
        pass
    with pytest.raises(SMPUnsupportedError, match="tensor parallelism"):
        later_versions.set_tensor_parallelism(nn.Linear(1, 1))
    for register in (later_versions.tp_register, later_versions.tp_register_with_module):
        with pytest.raises(SMPUnsupportedError, match="tensor parallelism"):
            register(nn.Linear)
    with pytest.raises(SMPUnsupportedError), later_versions.model_creation(tensor_parallelism=True):
        pass


def test_misspelt_keywords_of_model_creation_are_named() -> None:
    with (
        pytest.raises(TypeError, match=r"unexpected keywords flash_atention; .*flash_attention"),
        later_versions.model_creation(flash_atention=True),
    ):
        pass
    with later_versions.model_creation(zero_init=False, flash_attention=True, fused_softmax=True):
        pass


def test_later_features_that_are_left_off_do_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with later_versions.tensor_parallelism(enabled=False, fused_softmax=True):
            later_versions.set_tensor_parallelism(nn.Linear(1, 1), False)
        with later_versions.delay_param_initialization(enabled=False):
            pass
        with later_versions.model_creation(dtype=torch.float64):
            assert nn.Linear(1, 1).weight.dtype == torch.float64
        assert nn.Linear(1, 1).weight.dtype == torch.float32
    with pytest.warns(UserWarning, match="has no effect"), later_versions.delay_param_initialization():
        pass


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2"])
def test_checkpointed_modules_give_the_same_gradients_and_run_twice(strategy: str) -> None:
    torch.manual_seed(0)
    calls = 0

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x).tanh()

    model = nn.Sequential(*[Counted(3, 3) for _ in range(3)])
    x = torch.randn(2, 3)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]

    def gradients(run: Any) -> list[Any]:
        model.zero_grad()
        run().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    runs = [lambda: checkpoint_sequential(model, x, strategy), lambda: checkpoint(model, x)]
    for run in runs:
        calls = 0
        assert all(torch.equal(*pair) for pair in zip(gradients(run), expected, strict=True))
        assert calls == 6, "three in forward and again in backward"
    set_activation_checkpointing(model, strategy=strategy)
    assert all(torch.equal(*pair) for pair in zip(gradients(lambda: model(x)), expected, strict=True))
    block = nn.Linear(3, 3)
    set_activation_checkpointing(block)
    assert torch.equal(block(x), nn.functional.linear(x, block.weight, block.bias))
    with pytest.raises(ValueError, match="expected 'each', 'contiguous' or 'group_N'"):
        set_activation_checkpointing(model, strategy="some")

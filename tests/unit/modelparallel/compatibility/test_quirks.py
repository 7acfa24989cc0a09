"""Habits of libraries: each is still there in the version that is installed, and is met."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from opensmd.modelparallel.compatibility.quirks import (
    forget_fake_results,
    name_original_forwards,
    reader_of_gradient,
    reads_inner_weights,
    records_outputs,
)
from opensmd.modelparallel.runtime.tensors.functions import getter

_GRAD = getter("grad")


def test_models_of_transformers_say_that_they_record_outputs() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    assert records_outputs(transformers.BertModel(transformers.BertConfig(vocab_size=8, **sizes)))
    assert not records_outputs(nn.Linear(1, 1))


def test_functions_that_remember_fake_tensors_forget_all_and_others_nothing() -> None:
    # not at the top of the file: pytest's conftest hides that from the collector
    @functools.lru_cache(maxsize=4)
    def positions(count: int) -> dict[str, tuple[Tensor, ...]]:
        return {"positions": (torch.arange(count),)}

    @functools.lru_cache(maxsize=4)
    def name(number: int) -> str:
        return str(number)

    name(1)
    with FakeTensorMode():
        assert type(positions(3)["positions"][0]) is FakeTensor
    forget_fake_results()
    assert type(positions(3)["positions"][0]) is Tensor
    assert name.cache_info().currsize == 1


def kind_of(name: str, *bases: type) -> type[Any]:
    """A class of a library that is not installed."""
    place, _, own = name.rpartition(".")
    return type(own, bases or (nn.Module,), {"__module__": place})


@pytest.mark.parametrize(
    ("name", "variants", "expected"),
    [
        ("lora.layer.Linear", {}, False),
        ("lora.layer.Linear", {"use_dora": {"default": False}, "lora_variant": {}}, False),
        ("lora.layer.Linear", {"use_dora": {"default": True}}, True),
        ("lora.layer.Linear", {"lora_variant": {"default": object()}}, True),
        ("lora.layer.Embedding", {}, True),
        ("loha.layer.Linear", {}, True),
        ("ia3.layer.Linear", {}, False),
    ],
)
def test_layers_of_peft_that_compute_with_the_weights_in_them_are_known(
    name: str, variants: dict[str, Any], expected: bool
) -> None:
    layer = kind_of(f"peft.tuners.{name}", kind_of("peft.tuners.tuners_utils.BaseTunerLayer"))()
    layer.__dict__.update(variants)
    assert reads_inner_weights(layer) is expected
    assert not reads_inner_weights(nn.Linear(1, 1))


def test_classes_that_do_not_ask_for_an_original_forward_are_left_alone() -> None:
    name_original_forwards(nn.Sequential(nn.Bilinear(2, 2, 2)))
    assert not hasattr(nn.Bilinear, "_orig_forward")


class Asked(nn.Parameter):
    """Notes who reads its gradient."""

    levels: list[int | None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GRAD:
            args[0].levels.append(reader_of_gradient(sys._getframe(1), 3))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_torchs_clipping_is_known_by_its_frame() -> None:
    parameter = Asked(torch.ones(2))
    parameter.levels = []
    assert parameter.grad is None
    assert parameter.levels == [None]
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert {3, 4} & set(parameter.levels)

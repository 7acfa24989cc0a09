"""Tensor parallelism on CUDA: layers, models of torch and Hugging Face, with pipelines and checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks.tensor_parallel.test_huggingface import checkpointed_layers, load_pretrained, train
from tests.ranks.tensor_parallel.test_layers import CASES, compare
from tests.ranks.tensor_parallel.test_tensor_parallel import train_net
from tests.support.cuda import CudaRanks
from tests.support.made_on_gpu import on_device

Gpus = Callable[[int], CudaRanks]


def test_every_layer_computes_and_differentiates_as_on_one_rank(gpus: Gpus) -> None:
    gpus(2).run(on_device, compare, list(CASES), 2)


@pytest.mark.parametrize("prescaled", [False, True])
def test_distributed_modules_of_torch_train_like_the_plain_ones(gpus: Gpus, prescaled: bool) -> None:
    gpus(2).run(on_device, train_net, 2, 1, 2, prescaled)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_model_of_hugging_face_trains_like_the_original(gpus: Gpus, name: str) -> None:
    gpus(2).run(on_device, train, name, 1, 1, True)


def test_a_distributed_model_takes_a_checkpoint_of_the_original(gpus: Gpus) -> None:
    gpus(2).run(on_device, load_pretrained)


def test_tensors_and_stages_are_split_together(gpus: Gpus) -> None:
    gpus(4).run(on_device, train_net, 2, 2, 1, True)
    gpus(4).run(on_device, train, "gpt2", 2, 2, False)


def test_layers_of_a_distributed_transformer_are_checkpointed(gpus: Gpus) -> None:
    gpus(4).run(on_device, checkpointed_layers)

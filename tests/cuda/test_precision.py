"""16 bits and shared-out state on CUDA: masters, loss scales, sharded optimizer state and parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.replicas.test_sharded_model import (
    AT_ONCE,
    BY_BLOCK,
    trains_as_one_process,
    trains_in_16_bits,
)
from tests.ranks.replicas.test_sharded_optimizer import adam, trains_as_without, trains_in_16_bits_as_without
from tests.ranks.smp.test_precision import check_overflow, check_resume, every_case
from tests.support.cuda import CudaRanks
from tests.support.made_on_gpu import on_device

Gpus = Callable[[int], CudaRanks]


@pytest.mark.parametrize("partitions", [2, 1])
def test_half_precision_trains_like_torchs_own_recipe(gpus: Gpus, partitions: int) -> None:
    gpus(2).run(on_device, every_case, partitions)


@pytest.mark.parametrize("partitions", [2, 1])
def test_an_overflow_on_any_rank_skips_the_step_on_all(gpus: Gpus, partitions: int) -> None:
    gpus(2).run(on_device, check_overflow, partitions)


def test_masters_and_scale_are_saved_and_loaded(gpus: Gpus, tmp_path: Path) -> None:
    gpus(2).run(on_device, check_resume, tmp_path)


def test_sharded_optimizer_state_trains_as_whole(gpus: Gpus, tmp_path: Path) -> None:
    gpus(2).run(on_device, trains_as_without, adam, 1, tmp_path)


@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_masters_are_shared_out_with_the_state(gpus: Gpus, key: str) -> None:
    gpus(2).run(on_device, trains_in_16_bits_as_without, key, 1)


@pytest.mark.parametrize("settings", [BY_BLOCK, AT_ONCE], ids=["by block", "at once"])
def test_sharded_parameters_train_as_in_one_process(gpus: Gpus, settings: dict[str, float]) -> None:
    gpus(2).run(on_device, trains_as_one_process, 1, None, settings)


@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_sharded_parameters_of_16_bits_have_masters_of_their_parts(gpus: Gpus, key: str) -> None:
    gpus(2).run(on_device, trains_in_16_bits, key)


def test_a_split_model_shares_out_the_parameters_of_its_stages(gpus: Gpus) -> None:
    gpus(4).run(on_device, trains_as_one_process, 2, None, BY_BLOCK, False)

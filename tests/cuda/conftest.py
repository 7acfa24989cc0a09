"""The ranks of tests that need a GPU: ``make test-cuda`` runs them, on a machine that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.cuda import MAPPED, CudaRanks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End with one message where there is no GPU, instead of one a test."""
    if not MAPPED and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"tests/cuda needs a GPU, and torch {torch.__version__} finds none; its programs run on the CPU "
            "with OPENSMD_TEST_CUDA=mapped"
        )


@pytest.fixture(scope="session")
def gpus() -> Iterator[Callable[[int], CudaRanks]]:
    """``gpus(n)`` is the session's pool of ``n`` ranks on CUDA; its processes start at first use."""
    pools: dict[int, CudaRanks] = {}

    def of_size(world_size: int) -> CudaRanks:
        return pools.setdefault(world_size, CudaRanks(world_size))

    yield of_size
    for one in pools.values():
        one.close()

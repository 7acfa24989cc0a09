"""CUDA devices read as the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opensmd.launch.mapped_cuda.cpu_device import device_index, on_cpu, translated, without_cuda

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("cuda", "cpu"), ("cuda:3", "cpu"), ("cpu", "cpu"), ("meta", "meta"), ("cudart", "cudart"),
        (torch.device("cuda", 1), CPU), (torch.device("meta"), torch.device("meta")), (2, CPU), (None, None),
        (True, True),
    ],
)  # fmt: skip
def test_only_cuda_devices_are_read_as_the_cpu(given: Any, read: Any) -> None:
    assert without_cuda(given) == read and type(without_cuda(given)) is type(read)


@pytest.mark.parametrize(
    ("given", "index"),
    [
        (None, 1),
        ("cuda", 1),
        ("cuda:2", 2),
        ("2", 2),
        (0, 0),
        (-1, 1),
        (torch.device("cuda", 3), 3),
        (CPU, 1),
    ],
)
def test_a_device_has_the_number_that_torch_reads_in_it(given: Any, index: int) -> None:
    assert device_index(given, current=1, count=4) == index


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"invalid device ordinal 4: .* here 4, cuda:0 to cuda:3"):
        device_index(4, current=0, count=4)
    with pytest.raises(ValueError, match="expected a CUDA device, got cpu"):
        device_index("cpu", current=0, count=4)


def test_functions_get_the_cpu_by_keyword_and_by_position() -> None:
    def show(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert on_cpu(show)("cuda", device="cuda:1", pin_memory=True) == (("cuda",), {"device": "cpu"})
    assert translated(show, 1)("cuda", "cuda", "cuda") == (("cuda", "cpu", "cuda"), {})
    assert translated(show, 1)("cuda", device="cuda") == (("cuda",), {"device": "cpu"})
    assert translated(show, 1, "on")(device="cuda", on="cuda") == ((), {"device": "cuda", "on": "cpu"})

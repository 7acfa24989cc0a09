"""The fingerprints by which ranks find out whether they were given the same batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.messages.step_inputs import fingerprint

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_numbers_have_one_fingerprint_however_they_lie_in_memory(dtype: torch.dtype) -> None:
    plain = numbers(6, 4, dtype=dtype)
    assert fingerprint([plain.t().contiguous().t()]) == fingerprint([plain])
    assert fingerprint([plain.conj()]) == fingerprint([plain.conj().resolve_conj()])
    if dtype not in (torch.bool, torch.uint8):
        assert fingerprint([torch._neg_view(plain)]) == fingerprint([-plain])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 11, 23])
def test_one_other_number_changes_the_fingerprint(dtype: torch.dtype, place: int) -> None:
    plain = numbers(6, 4, dtype=dtype)
    other = plain.clone()
    other.view(-1)[place] = other.view(-1)[place].logical_not().to(dtype)
    assert fingerprint([other]) != fingerprint([plain])


def test_of_large_tensors_every_sample_is_looked_at() -> None:
    plain = numbers(32, 4096)
    for sample in range(32):
        other = plain.clone()
        other[sample] = 2
        assert fingerprint([other]) != fingerprint([plain])


def test_tensors_without_axes_without_numbers_and_with_gradients_have_fingerprints() -> None:
    assert fingerprint([torch.tensor(1.0)]) != fingerprint([torch.tensor(2.0)])
    assert fingerprint([torch.empty(3, 0)]) == fingerprint([])
    assert fingerprint([torch.ones(2, requires_grad=True)]) == fingerprint([torch.ones(2)])


LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.jagged]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tensors_that_are_made_of_others_have_fingerprints(layout: torch.layout) -> None:
    def made(numbers: Tensor) -> Tensor:
        if layout is torch.jagged:
            return torch.nested.nested_tensor([numbers[:1], numbers[1:]], layout=layout)
        return numbers.to_sparse(layout=layout)

    plain = torch.arange(12.0).view(3, 4)
    assert fingerprint([made(plain)]) == fingerprint([made(plain.clone())])
    assert fingerprint([made(plain)]) != fingerprint([made(plain * 2)])


def test_what_nobody_can_look_into_is_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)], layout=torch.strided)
    with pytest.raises(SMPUnsupportedError, match=r"a nested tensor of strided layout.*make it in the step"):
        fingerprint([nested])

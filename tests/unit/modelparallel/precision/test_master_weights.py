"""FP32 masters of parameters of 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.precision.master_weights import MasterWeights, dense_gradients


def made(
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[MasterWeights, dict[str, Any], nn.Parameter, nn.Parameter]:
    """Masters of a group with a parameter of 16 bits and one of 32."""
    half, full = nn.Parameter(torch.ones(2, dtype=dtype)), nn.Parameter(torch.ones(2))
    numbers = {id(half): 3, id(full): 4}
    masters, group = MasterWeights(numbers), {"params": [half, full]}
    masters.replace(group)
    return masters, group, half, full


def test_masters_stand_in_the_place_of_their_parameters_and_have_their_numbers() -> None:
    masters, group, half, full = made()
    master = group["params"][0]
    assert master.dtype is torch.float32 and group["params"][1] is full
    assert masters.number(master) == 3
    assert masters.parameter_of(master) is half and masters.parameter_of(full) is full


def test_updates_too_small_for_16_bits_add_up_in_a_master() -> None:
    masters, group, half, _ = made()
    master = group["params"][0]
    for _step in range(5):
        with torch.no_grad():
            master += 2.0**-9  # bfloat16 rounds 1 + 2**-9 to 1
        masters.round_into_model()
    assert half[0].item() > 1.0
    masters.follow_model()
    assert master[0].item() == 1.0 + 5 * 2.0**-9, "it knows more than the parameter, to which it still rounds"
    with torch.no_grad():
        half[0] = 5.0
    masters.follow_model()
    assert master.tolist() == [5.0, 1.0 + 5 * 2.0**-9]
    masters.reload()
    assert master[1].item() == half[1].item()


def test_gradients_come_to_masters_in_32_bits() -> None:
    masters, group, half, _ = made(torch.float16)
    master = group["params"][0]
    half.grad = torch.full_like(half, 3.0)
    masters.take_gradients()
    assert (
        master.grad is not None and master.grad.dtype is torch.float32 and master.grad.tolist() == [3.0, 3.0]
    )
    memory = master.grad.data_ptr()
    half.grad = torch.full_like(half, 4.0)
    masters.take_gradients()
    assert master.grad.tolist() == [4.0, 4.0] and master.grad.data_ptr() == memory
    half.grad = None
    masters.take_gradients()
    assert master.grad is None


def test_of_sparse_gradients_the_stored_values_are_given_once_each() -> None:
    table = nn.Embedding(4, 1, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    (values,) = dense_gradients([table.weight, nn.Parameter(torch.ones(1))])
    assert values.tolist() == [[2.0], [1.0]]
    values.mul_(10)
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().flatten().tolist() == [0.0, 20.0, 0.0, 10.0]

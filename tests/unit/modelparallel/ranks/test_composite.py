"""Tensors made of others, taken apart and put together."""

from __future__ import annotations

import pickle

import torch
from torch.testing._internal.two_tensor import TwoTensor

from opensmd.modelparallel.ranks.composite import (
    composed,
    empty_parts,
    form_of,
    is_composite,
    plain_parts,
    take_parts,
)
from tests.support.quantized import Quantized


def test_a_plain_tensor_is_its_own_part() -> None:
    tensor = torch.ones(2)
    assert not is_composite(tensor) and form_of(tensor) is None
    assert plain_parts(tensor) == [tensor] and composed(None, iter([tensor])) is tensor


def test_a_composite_is_put_together_from_its_parts_and_a_form_that_travels() -> None:
    given = Quantized.of(torch.tensor([[1.0, -2.0], [0.5, 0.25]]))
    parts = plain_parts(given)
    assert parts == [given.codes, given.scale]
    made = composed(pickle.loads(pickle.dumps(form_of(given))), iter(parts))
    assert type(made) is Quantized and torch.equal(made.values(), given.values())


def test_composites_of_composites_come_apart_to_the_last_tensor() -> None:
    inner = Quantized.of(torch.ones(3))
    nested = TwoTensor(inner, inner)
    assert [each.shape for each in plain_parts(nested)] == [(3,), (), (3,), ()]
    made = composed(form_of(nested), iter(plain_parts(nested)))
    assert type(made) is TwoTensor and type(made.a) is Quantized


def test_without_its_data_a_composite_keeps_its_form_and_can_take_another_ones() -> None:
    given, other = Quantized.of(torch.ones(2, 3)), Quantized.of(torch.full((2, 3), 2.0))
    empty_parts(given)
    assert given.codes.is_meta and given.codes.shape == (2, 3)
    take_parts(given, other)
    assert torch.equal(given.values(), other.values())

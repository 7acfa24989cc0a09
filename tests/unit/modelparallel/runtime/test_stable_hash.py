"""A hash that all processes agree on."""

from __future__ import annotations

import torch

from opensmd.modelparallel.runtime.stable_hash import stable_hash


def test_a_key_has_the_same_hash_in_every_process() -> None:
    key = ("module", "layers.0", True, (torch.float32, torch.Size([2, 3])), torch.nn.functional.relu, dict)
    assert stable_hash(key, 64) == 15017876688614815949


def test_so_many_bits_are_used() -> None:
    values = [stable_hash(("call", number), 12) for number in range(200)]
    assert max(values) < 1 << 12 and len(set(values)) > 150


def test_what_differs_has_another_hash() -> None:
    keys = [
        ("a", 1),
        ("a", "1"),
        ("a", (1,)),
        ("a", True),
        ("a", torch.add),
        ("a", torch.sub),
        ("a", int),
        ("a", None),
    ]
    assert len({stable_hash(key, 64) for key in keys}) == len(keys)

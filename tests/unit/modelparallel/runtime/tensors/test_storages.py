"""Which tensors have bytes in common, against sets of their addresses."""

from __future__ import annotations

import gc

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opensmd.modelparallel.runtime.tensors.storages import StorageSet, has_storage, overlapping


@st.composite
def views(draw: st.DrawFn, memory: list[Tensor]) -> Tensor:
    base = draw(st.sampled_from(memory))
    offset = draw(st.integers(0, base.numel()))
    room = base.numel() - offset
    sizes, strides = [], []
    for _ in range(draw(st.integers(0, 2))):
        stride = draw(st.integers(0, 3))
        most = 3 if stride == 0 else max(0, (room - 1) // stride) + (room > 0)
        size = draw(st.integers(0, min(3, most)))
        sizes.append(size)
        strides.append(stride)
        room -= max(0, size - 1) * stride
    if room <= 0 and 0 not in sizes:
        sizes, strides = [0], [1]
    return base.as_strided(sizes, strides, offset)


def addresses(tensor: Tensor) -> set[int]:
    """Of every byte between the first and the last that the tensor reaches."""
    if not tensor.numel():
        return set()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return set(range(tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize))


@given(st.data())
def test_tensors_are_together_if_their_bytes_are_directly_or_through_others(data: st.DataObject) -> None:
    memory = [torch.zeros(9), torch.zeros(5, dtype=torch.int16)]
    tensors = data.draw(st.lists(views(memory), max_size=7))
    groups: list[tuple[set[int], list[int]]] = []
    for tensor in tensors:
        reached, members = addresses(tensor), [id(tensor)]
        for group in [group for group in groups if group[0] & reached]:
            groups.remove(group)
            reached, members = reached | group[0], members + group[1]
        groups.append((reached, members))
    found = overlapping(tensors)
    together = {frozenset(one for one in found if found[one] == group) for group in set(found.values())}
    assert together == {frozenset(members) for _, members in groups}


def test_a_tensor_that_reaches_over_others_joins_them() -> None:
    memory = torch.zeros(10)
    long, first, second, beyond = memory[:8], memory[1:2], memory[6:7], memory[8:]
    found = overlapping([second, beyond, long, first])
    assert found[id(long)] == found[id(first)] == found[id(second)] != found[id(beyond)]


def test_a_storage_that_is_gone_is_not_taken_for_one_at_the_same_place() -> None:
    storages = StorageSet()
    kept = torch.zeros(4)
    assert storages.add(kept) and not storages.add(kept[1:])
    for _ in range(50):
        lost = torch.zeros(4)
        assert storages.add(lost), "this memory is new, even if the allocator gives the same out again"
        del lost
        gc.collect(0)
    assert kept in storages and torch.zeros(4) not in storages


def test_tensors_without_a_storage_are_in_no_set() -> None:
    sparse = torch.eye(2).to_sparse()
    storages = StorageSet()
    assert not storages.add(sparse) and sparse not in storages
    assert not has_storage(sparse) and has_storage(torch.zeros(1))
    assert (
        overlapping([sparse, sparse.detach()]) == {id(sparse): id(sparse)} or len(overlapping([sparse])) == 1
    )

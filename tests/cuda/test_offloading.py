"""Activation checkpoints on CUDA, kept on the device or in pinned memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from opensmd.modelparallel.offloading.offloading import Offloading
from opensmd.modelparallel.offloading.pinned_store import PinnedStore
from tests.ranks.smp.test_activation_checkpointing import every_way, of_transformers
from tests.support.cuda import DEVICE, MAPPED, CudaRanks
from tests.support.made_on_gpu import on_device

Gpus = Callable[[int], CudaRanks]
LAYERS, SIZE = 8, 1 << 22  # bytes of an activation: 16 MiB


@pytest.mark.parametrize("partitions", [1, 2])
def test_checkpointed_and_offloaded_layers_give_the_plain_models_gradients(
    gpus: Gpus, partitions: int
) -> None:
    gpus(partitions).run(on_device, every_way, partitions)


def test_checkpoints_that_a_hugging_face_model_makes_are_offloaded(gpus: Gpus) -> None:
    for (kept, _), *offloaded in gpus(2).run(on_device, of_transformers, 2):
        for numbers, count in offloaded:
            assert numbers == pytest.approx(kept, rel=1e-5)
            assert count > 0


class _Layer(torch.autograd.Function):
    """Keeps its input, which is offloaded, and needs it for its gradient."""

    @staticmethod
    def forward(ctx: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1.5

    @staticmethod
    def backward(ctx: SimpleNamespace, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1.5 + 0.0 * x) + 0.001 * x


def through_layers(offloading: Offloading | None) -> tuple[torch.Tensor, int]:
    """The gradient of a chain of large activations, and the bytes on the device at its end."""
    leaf = torch.linspace(-1, 1, SIZE, device=DEVICE).requires_grad_()
    hidden = leaf * 1.0
    for _ in range(LAYERS):
        if offloading is None:
            hidden = _Layer.apply(hidden)
            continue
        with offloading.of_inputs([hidden]):
            hidden = _Layer.apply(hidden)
    loss = hidden.mean()
    del hidden
    torch.cuda.synchronize()
    held = 0 if MAPPED else torch.cuda.memory_allocated()
    torch.autograd.backward(loss)
    assert leaf.grad is not None
    return leaf.grad, held


def pinned() -> None:
    """What comes back is what has left, and the device has room for more meanwhile."""
    wanted, whole = through_layers(None)
    offloading = Offloading.asked_for(3)
    for _ in range(2):
        found, held = through_layers(offloading)
        assert torch.equal(found, wanted)
        if not MAPPED:
            assert any(isinstance(store, PinnedStore) for store in offloading._stores.values())
            assert whole - held >= (LAYERS - 4) * 4 * SIZE, (whole, held)
    assert offloading.count == 2 * LAYERS


def test_activations_in_pinned_memory_are_the_same_and_leave_room(gpus: Gpus) -> None:
    gpus(1).run(pinned)

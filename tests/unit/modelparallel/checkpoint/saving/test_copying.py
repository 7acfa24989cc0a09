"""Copies made beside training: what writers wait for, and what becomes known of those that do not."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from opensmd.modelparallel.checkpoint.saving.copying import PIECE, Copying, can_be_copied_later
from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.runtime.tensors.before_writing import before_writing

LARGE = PIECE // 4 * 2 + 1000  # elements: three pieces


def copying(*sources: Tensor) -> tuple[Copying, list[Tensor]]:
    copies = [torch.empty_like(source) for source in sources]
    return Copying(list(zip(sources, copies, strict=True)), lambda tensor: f"weight {len(tensor)}"), copies


def trained() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.arange(LARGE, dtype=torch.float32))
    parameter.grad = torch.ones_like(parameter)
    return parameter, torch.optim.SGD([parameter], lr=1.0)


def test_a_step_of_any_optimizer_waits_until_everything_has_been_copied() -> None:
    parameter, optimizer = trained()
    work, (copy,) = copying(parameter.detach())
    optimizer.step()
    work.require_untouched()
    assert torch.equal(copy, torch.arange(LARGE, dtype=torch.float32))
    assert torch.equal(parameter, copy - 1)


def test_a_step_waits_for_several_copies_and_goes_on_to_the_hooks_of_the_script() -> None:
    parameter, optimizer = trained()
    works = [copying(parameter.detach())[0] for _ in range(3)]
    called = []
    handle = register_optimizer_step_pre_hook(lambda *_: called.append(1))
    optimizer.step()
    handle.remove()
    assert called == [1]
    for work in works:
        work.require_untouched()


def test_a_step_and_a_thread_share_the_copying() -> None:
    for _ in range(20):
        parameter, optimizer = trained()
        work, (copy,) = copying(parameter.detach())
        thread = threading.Thread(target=work.require_untouched)
        thread.start()
        optimizer.step()
        thread.join()
        work.require_untouched()
        assert torch.equal(copy, torch.arange(LARGE, dtype=torch.float32))


def test_what_waits_for_no_optimizer_asks_for_the_copies() -> None:
    source = torch.zeros(LARGE)
    work, (copy,) = copying(source)
    before_writing()
    source.fill_(1)
    work.require_untouched()
    assert not copy.any()


def through_numpy(tensor: Tensor) -> None:
    tensor.numpy()[:] = 7


def through_a_view(tensor: Tensor) -> None:
    tensor[1::2].mul_(2)


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.fill_(7),
        lambda tensor: tensor.data.add_(1),
        lambda tensor: torch._foreach_add_([tensor], 1),
        through_a_view,
        through_numpy,
    ],
)
def test_a_write_that_came_before_the_copy_is_told_by_name(write: Callable[[Tensor], object]) -> None:
    source, other = torch.arange(LARGE, dtype=torch.float32), torch.zeros(LARGE + 1)
    work, _ = copying(other, source)
    write(source)
    with pytest.raises(SMPCheckpointError, match=rf"^weight {LARGE} was written after .*wait_until_copied"):
        work.require_untouched()


def test_a_write_that_a_thread_sees_only_later_is_told_too() -> None:
    """As one that was under way while its tensor was copied: torch counts it when it ends."""
    source = torch.zeros(LARGE)
    work, _ = copying(source)
    work.require_untouched()
    source.add_(1)
    for _ in range(2):
        with pytest.raises(SMPCheckpointError, match="was written"):
            work.require_untouched()
        work.finish()
    source.add_(1)


def test_nan_is_no_write() -> None:
    work, (copy,) = copying(torch.full((LARGE,), float("nan")))
    work.require_untouched()
    assert copy.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_every_type_is_copied_whole(dtype: torch.dtype) -> None:
    source = (torch.rand(LARGE) * 50).to(dtype)
    work, (copy,) = copying(source)
    work.require_untouched()
    assert torch.equal(copy, source)


def test_only_large_plain_tensors_are_copied_later() -> None:
    large = torch.zeros(512, 512)
    assert can_be_copied_later(large)
    with torch.inference_mode():
        uncounted = torch.zeros(512, 512)
    for other in (torch.zeros(3), large.t(), large[:, :256], large.to_sparse(), uncounted):
        assert not can_be_copied_later(other)

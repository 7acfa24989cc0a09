"""The private parts of torch that the package stands on: these fail loudly when torch changes them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from opensmd.legacy import _torch_internals as c10d

pytestmark = pytest.mark.newest


def test_a_private_group_works_and_torch_distributed_does_not_know_of_it() -> None:
    store = dist.HashStore()
    group = c10d.private_group("gloo", store=store, name="a", rank=3, ranks=[3], timeout=5)
    options = c10d.AllreduceOptions()
    options.asyncOp = False
    work = group.allreduce([torch.ones(2)], options)
    work.wait()
    assert (group.rank(), group.size()) == (0, 1)
    assert not dist.is_initialized()
    assert group not in dist.distributed_c10d._world.pg_map


def test_a_callback_runs_once_at_the_end_of_backward() -> None:
    seen: list[float] = []
    weight = torch.ones(2, requires_grad=True)
    hook = weight.register_hook(
        lambda grad: c10d.after_backward(lambda: seen.append(weight.grad.sum().item()))
    )
    (weight * 3).sum().backward()
    hook.remove()
    (weight * 3).sum().backward()
    assert seen == [6.0]

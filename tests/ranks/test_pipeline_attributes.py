"""What hooks have put into attributes of modules is, after a step, what the last microbatch has put there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools
from tests.support.partitioned import restart

WIDTH, MICROBATCHES, STEPS = 8, 4, 3


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])


def keep_output(module: nn.Module, given: Any, out: Tensor) -> None:
    module.seen = out.detach()


def keep_gradient(module: nn.Module, into: Any, out: tuple[Tensor, ...]) -> None:
    module.gradient = out[0]


def watch(module: nn.Module) -> nn.Module:
    for layer in module:
        layer.register_forward_hook(keep_output)
        layer.register_full_backward_hook(keep_gradient)
    return module


def what_is_left(looped: bool) -> list[int]:
    """Train; the layers on this rank, whose attributes have been compared with plain PyTorch's."""
    restart(partitions=2, microbatches=MICROBATCHES, auto_partition=False, default_partition=0)
    plain, module = watch(build()), watch(build())
    for number, layer in enumerate(module.children()):
        smp.set_partition(layer, number % 2 if looped else number // 2)
    model = smp.DistributedModel(module)

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    for number in range(STEPS):
        x = torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(number))
        step(x)
        for part in x.chunk(MICROBATCHES):
            torch.autograd.backward(plain(part).square().mean() / MICROBATCHES)
        local = [name for name, _ in module.named_children() if model.is_local(f"{name}.0.weight")]
        for name in local:
            for attribute in ("seen", "gradient"):
                mine = getattr(module.get_submodule(name), attribute)
                torch.testing.assert_close(mine, getattr(plain.get_submodule(name), attribute))
    return [int(name) for name in local]


@pytest.mark.parametrize("looped", [False, True], ids=["chain", "looped"])
def test_hooks_leave_what_the_last_microbatch_has_put_into_attributes(pool: Pools, looped: bool) -> None:
    found = pool(2).run(what_is_left, looped)
    assert sorted(found) == ([[0, 2], [1, 3]] if looped else [[0, 1], [2, 3]])

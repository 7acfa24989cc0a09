"""What ``smp.shutdown`` leaves of a model that has been trained in parts: nothing."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.microbatch_threads import wait_until_microbatch_threads_end
from tests.support.patience import PATIENCE
from tests.support.ranks import RankPool


def trained_in_parts(*, measured: bool) -> list[weakref.ref[Tensor]]:
    """The parameters, and what the dry run's forward computed."""
    smp.init({"partitions": 2, "microbatches": 2})
    torch.manual_seed(5)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    seen = [weakref.ref(parameter) for parameter in net.parameters()]
    model = smp.DistributedModel(net, trace_memory_usage=measured)

    @smp.step
    def step(x: Tensor) -> Tensor:
        out = model(x)
        if smp.is_tracing():
            seen.append(weakref.ref(out))
        model.backward(out.square().mean())
        return out

    for _ in range(2):
        step(torch.ones(4, 8))
    return seen


def nothing_is_left(measured: bool) -> None:
    smp.shutdown()  # what an earlier test on these processes may have left
    seen = trained_in_parts(measured=measured)
    smp.shutdown()
    gc.collect()
    kept = [tensor.shape for ref in seen if (tensor := ref()) is not None]
    assert not kept, kept
    wait_until_microbatch_threads_end()


@pytest.mark.parametrize("measured", [False, True])
def test_a_model_its_dry_run_and_its_threads_are_gone_after_shutdown(
    pool: Callable[[int], RankPool], measured: bool
) -> None:
    pool(2).run(nothing_is_left, measured)


def ended_in_a_fork() -> int:
    """How a forked child ends, after which its parent goes on."""
    smp.shutdown()
    at_exit: list[tuple[Callable[..., object], tuple[object, ...]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atexit, "register", lambda function, *args: at_exit.append((function, args)))
        trained_in_parts(measured=False)
    assert at_exit
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE / 4))  # ends a child that waits
        try:
            for function, args in at_exit:
                function(*args)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]
    smp.shutdown()
    return status


def test_a_forked_child_ends_and_leaves_its_parents_groups_alone(pool: Callable[[int], RankPool]) -> None:
    assert pool(2).run(ended_in_a_fork, backend=None) == [0, 0]


def fails_at_first() -> list[bool]:
    """Whether the default group of a call that failed, and that of the next one, are left."""
    smp.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    left = []
    with pytest.raises(ValueError, match="3 partitions"):
        smp.init({"partitions": 3})
    left.append(dist.is_initialized())
    smp.init({"partitions": 2})
    smp.shutdown()
    return [*left, dist.is_initialized()]


def test_a_group_that_a_failed_call_has_made_goes_with_it(pool: Callable[[int], RankPool]) -> None:
    assert pool(2).run(fails_at_first) == [[False, False]] * 2

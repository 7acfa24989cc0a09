"""The private parts of torch's DistributedDataParallel that hybrid parallelism needs, in one place.

tests/ranks/replicas/test_hybrid.py fails loudly when torch changes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opensmd.modelparallel.exceptions import SMPError

__all__ = [
    "DistributedStage",
    "NotForDDP",
    "arm",
    "begin",
    "begin_again",
    "dismantle",
    "has_finished",
    "ignoring",
    "is_joining",
]


class NotForDDP:
    """Mixin for a module that torch's DistributedDataParallel must not wrap; its constructor then fails."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        # the first method that the constructor calls on every module
        raise SMPError(
            f"a {type(self).__name__} was given to DistributedDataParallel, which would mistake the "
            "partitions for replicas: leave it out, as the setting ddp=True averages gradients by itself"
        )


class DistributedStage(DistributedDataParallel):
    """A stage's part of a module, which sends those buffers whose data is on this rank.

    Args:
        has_data: tells of a buffer whether it is. That may change: a forward may replace one that all stages
            have by what one of them has computed.
        args, kwargs: torch's.
    """

    def __init__(self, *args: Any, has_data: Callable[[Tensor], bool], **kwargs: Any) -> None:
        self._has_data = has_data
        super().__init__(*args, **kwargs)

    def _assign_modules_buffers(self) -> None:
        super()._assign_modules_buffers()  # type: ignore[no-untyped-call]
        buffers = self.named_module_buffers.items()
        here = {name: buffer for name, buffer in buffers if self._has_data(buffer)}
        self.named_module_buffers, self.modules_buffers = here, [*here.values()]

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if self.modules_buffers:  # torch cannot broadcast nothing
            super()._sync_module_buffers(authoritative_rank)  # type: ignore[no-untyped-call]


def begin(ddp: DistributedDataParallel, *, reduce: bool) -> None:
    """Do what DDP does before a forward: join notice, new buckets, buffers. ``reduce=False`` is its no_sync.

    Unlike DDP, it sends buffers even after a no_sync, except within ``join``, whose finished replicas behave
    like DDP.
    """
    ddp.require_backward_grad_sync = reduce
    if not is_joining(ddp):
        ddp.require_forward_param_sync = True
    if not ddp.modules_buffers:
        # Without any, it would not look for new ones.
        ddp._assign_modules_buffers()  # type: ignore[no-untyped-call]
    ddp._pre_forward()  # type: ignore[no-untyped-call]


def begin_again(ddp: DistributedDataParallel) -> None:
    """Prepare for arming another backward of the same step.

    Buffers are not sent, because this backward may need their old values, except within ``join``, where
    finished replicas send them with every backward.
    """
    sends_buffers = ddp.require_forward_param_sync
    ddp.require_forward_param_sync = sends_buffers and ddp._join_config.enable
    ddp._pre_forward()  # type: ignore[no-untyped-call]
    ddp.require_forward_param_sync = sends_buffers


def arm(ddp: DistributedDataParallel, roots: Sequence[Tensor]) -> None:
    """Do what DDP does after a forward that returned ``roots``; from now on every gradient counts."""
    ddp._post_forward(list(roots))  # type: ignore[no-untyped-call]


def has_finished(ddp: DistributedDataParallel) -> bool:
    """Whether all gradients of the armed backward have arrived."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        return False
    return True


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Whether DDP is within its ``join``."""
    return bool(ddp._join_config.enable)


def dismantle(ddp: DistributedDataParallel) -> None:
    """Remove the reducer's hooks from the parameters, so that nothing counts any more.

    The hooks go with the reducer itself, which only DDP and its logger hold.
    """
    del ddp.reducer, ddp.logger


@contextlib.contextmanager
def ignoring(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Make a DistributedDataParallel that is built inside ignore ``names`` of ``module``."""
    # in one place, torch joins the names of module and parameter with a dot even at the root
    everywhere = [*names, *(f".{name}" for name in names if "." not in name)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        module, everywhere
    )
    try:
        yield
    finally:
        del module._ddp_params_and_buffers_to_ignore

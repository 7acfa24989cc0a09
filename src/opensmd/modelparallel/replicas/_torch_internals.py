"""The private parts of torch's DistributedDataParallel that hybrid parallelism needs, in one place.

tests/ranks/replicas/test_hybrid.py fails loudly when torch changes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opensmd.modelparallel.exceptions import SMPError

__all__ = [
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
    """Mixed into a module that torch's DistributedDataParallel must not wrap: its constructor then fails."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        # the first thing that the constructor asks of every module
        raise SMPError(
            f"a {type(self).__name__} was given to DistributedDataParallel, which would mistake the "
            "partitions for replicas: leave it out, as the setting ddp=True averages gradients by itself"
        )


def begin(ddp: DistributedDataParallel, *, reduce: bool) -> None:
    """What DDP does before a forward: join notice, new buckets, buffers. ``reduce=False`` is its no_sync.

    Unlike DDP, which leaves buffers alone after a no_sync, except within ``join``, whose replicas that have
    ended do as DDP does.
    """
    ddp.require_backward_grad_sync = reduce
    if not is_joining(ddp):
        ddp.require_forward_param_sync = True
    ddp._pre_forward()  # type: ignore[no-untyped-call]


def begin_again(ddp: DistributedDataParallel) -> None:
    """Let another backward of the same step be armed.

    Buffers stay as they are, because this backward may need what they were; only within ``join``, where
    replicas that have ended send them with every backward, are they sent.
    """
    sends_buffers = ddp.require_forward_param_sync
    ddp.require_forward_param_sync = sends_buffers and ddp._join_config.enable
    ddp._pre_forward()  # type: ignore[no-untyped-call]
    ddp.require_forward_param_sync = sends_buffers


def arm(ddp: DistributedDataParallel, roots: Sequence[Tensor]) -> None:
    """What DDP does after a forward that returned ``roots``: from now on every gradient counts."""
    ddp._post_forward(list(roots))  # type: ignore[no-untyped-call]


def has_finished(ddp: DistributedDataParallel) -> bool:
    """Whether all gradients that the armed backward was to bring have come."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        return False
    return True


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Whether it is within its ``join``."""
    return bool(ddp._join_config.enable)


def dismantle(ddp: DistributedDataParallel) -> None:
    """Take the reducer's hooks off the parameters: nothing counts any more.

    The hooks go with the reducer itself, which DDP and its logger alone hold.
    """
    del ddp.reducer, ddp.logger


@contextlib.contextmanager
def ignoring(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let a DistributedDataParallel that is built inside leave ``names`` of ``module`` alone."""
    # in one place torch joins the module's and the parameter's name with a dot even at the root
    everywhere = [*names, *(f".{name}" for name in names if "." not in name)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        module, everywhere
    )
    try:
        yield
    finally:
        del module._ddp_params_and_buffers_to_ignore

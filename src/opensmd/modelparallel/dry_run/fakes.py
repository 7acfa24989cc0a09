"""The fake tensors of a dry run. What has been kept of them beyond it has no data, and must not be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from opensmd.modelparallel.exceptions import SMPUnsupportedError

__all__ = ["Fakes"]


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Makes fake tensors until the end of the run; afterwards, computing with one is an error.

    Beside real tensors it would give more fakes, and their data, which are nowhere, would be sent.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._ended = False

    def end(self) -> None:
        """Refuse the tensors from now on."""
        self._ended = True

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> Any:
        if self._ended:
            raise SMPUnsupportedError(
                f"{func} was called on a tensor of the dry run before the first step, which has no data. "
                "Something that a forward fills has kept it where the dry run is not undone (a cache in a "
                "library's object): fill it before the first step, or pass trace_memory_usage=True to "
                "smp.DistributedModel, so that the dry run computes for real"
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

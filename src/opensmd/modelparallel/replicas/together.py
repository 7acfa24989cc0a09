"""Several reducers of one model, for parameters replicated on different ranks, combined into one.

With tensor parallelism, a stage's parameters have replicas on two sets of ranks: undistributed modules are on
all ranks of the data-parallel group, distributed modules only on those with the same position in their
groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.replicas.comm_hook import CommHook
from opensmd.modelparallel.replicas.reducer import Replicas

__all__ = ["ReplicasTogether", "refuse_common_hook"]


class ReplicasTogether:
    """Passes every call to all reducers, in the same order on all ranks.

    Args:
        members: reducers of disjoint parameters.
    """

    def __init__(self, members: Sequence[Replicas]) -> None:
        self._members = members

    def before_step(self) -> None:
        """See :meth:`Replicas.before_step`."""
        for member in self._members:
            member.before_step()

    def before_last_backward(self, roots: Sequence[Tensor]) -> None:
        """See :meth:`Replicas.before_last_backward`."""
        for member in self._members:
            member.before_last_backward(roots)

    def after_backward(self) -> None:
        """See :meth:`Replicas.after_backward`."""
        for member in self._members:
            member.after_backward()

    def abandon_step(self) -> None:
        """See :meth:`Replicas.abandon_step`."""
        for member in self._members:
            member.abandon_step()

    def after_step(self, *, backward_ran: bool) -> None:
        """See :meth:`Replicas.after_step`."""
        for member in self._members:
            member.after_step(backward_ran=backward_ran)

    def join(self, *options: bool) -> contextlib.AbstractContextManager[Any]:
        """See :meth:`Replicas.join`; for a single reducer.

        Raises:
            RuntimeError: there are several, because ranks that share tensors need equally many steps.
        """
        if len(self._members) == 1:
            return self._members[0].join(*options)
        raise RuntimeError(
            "join does not work with distributed modules: the ranks of a tensor-parallel group compute each "
            "step together, so all need equally many"
        )

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """See :meth:`Replicas.register_comm_hook`; for a single reducer.

        Raises:
            SMPUnsupportedError: there are several, and a hook cannot know over which ranks to average.
        """
        if len(self._members) > 1:
            refuse_common_hook()
        self._members[0].register_comm_hook(state, hook)


def refuse_common_hook() -> NoReturn:
    """Refuse a comm hook for several reducers.

    Raises:
        SMPUnsupportedError: always.
    """
    raise SMPUnsupportedError(
        "comm hooks cannot be combined with distributed modules that have replicas: gradients of their "
        "parameters are averaged over smp.get_rdp_process_group(), those of all others over "
        "smp.get_dp_process_group(), and a hook is not told which it has"
    )

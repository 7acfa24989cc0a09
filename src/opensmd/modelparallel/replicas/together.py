"""Several reducers of one model, each for parameters that other ranks have, as one.

With tensor parallelism a stage's parameters have replicas on two sets of ranks: what is not distributed is on
all ranks of the data-parallel group, distributed modules only on those with the same place in their groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.replicas.reducer import CommHook, Replicas

__all__ = ["ReplicasTogether", "refuse_common_hook"]


class ReplicasTogether:
    """Tells each reducer everything; in the same order on all ranks.

    Args:
        members: of parameters that do not overlap.
    """

    def __init__(self, members: Sequence[Replicas]) -> None:
        self._members = members

    def before_step(self) -> None:
        """As :meth:`Replicas.before_step`."""
        for member in self._members:
            member.before_step()

    def before_last_backward(self, roots: Sequence[Tensor]) -> None:
        """As :meth:`Replicas.before_last_backward`."""
        for member in self._members:
            member.before_last_backward(roots)

    def after_backward(self) -> None:
        """As :meth:`Replicas.after_backward`."""
        for member in self._members:
            member.after_backward()

    def abandon_step(self) -> None:
        """As :meth:`Replicas.abandon_step`."""
        for member in self._members:
            member.abandon_step()

    def after_step(self, *, backward_ran: bool) -> None:
        """As :meth:`Replicas.after_step`."""
        for member in self._members:
            member.after_step(backward_ran=backward_ran)

    def join(self, *options: bool) -> contextlib.AbstractContextManager[Any]:
        """As :meth:`Replicas.join`, for one reducer.

        Raises:
            RuntimeError: there are several: ranks that share tensors need equally many steps.
        """
        if len(self._members) == 1:
            return self._members[0].join(*options)
        raise RuntimeError(
            "join does not work with distributed modules: the ranks of a tensor-parallel group compute each "
            "step together, so all need equally many"
        )

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """As :meth:`Replicas.register_comm_hook`, for one reducer.

        Raises:
            SMPUnsupportedError: there are several, and a hook is not told over which ranks to average.
        """
        if len(self._members) > 1:
            refuse_common_hook()
        self._members[0].register_comm_hook(state, hook)


def refuse_common_hook() -> NoReturn:
    """Say why there is none for several reducers.

    Raises:
        SMPUnsupportedError: always.
    """
    raise SMPUnsupportedError(
        "comm hooks cannot be combined with distributed modules that have replicas: gradients of their "
        "parameters are averaged over smp.get_rdp_process_group(), those of all others over "
        "smp.get_dp_process_group(), and a hook is not told which it has"
    )

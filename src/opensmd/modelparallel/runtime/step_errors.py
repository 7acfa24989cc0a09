"""How a step fails: what its errors say, that all ranks learn of them, and that no later step waits.

An error of the process group says which operation failed, but nothing about the step. That is added here,
once, depending on where it came from::

    before or after the microbatches    Explained      "the step 'train' stopped while ..."
    a turn, with all of them waiting    stopped        "the pipeline stopped: microbatch 0 waits ..."
    inside a microbatch                 located        "the pipeline stopped: microbatch 0 was at ..."

All errors of a step, the group's and the user's, go through its engine's :class:`StepErrors`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistBackendError

from opensmd.collectives._torch_internals import abort_with
from opensmd.modelparallel._torch_internals import gathered_vectors
from opensmd.modelparallel.exceptions import PeerFailed, SMPError
from opensmd.modelparallel.planning.policies.policy import Progress
from opensmd.modelparallel.ranks.poisoned_groups import poison, require_sound
from opensmd.modelparallel.ranks.sendable import control_device
from opensmd.modelparallel.runtime.messages.transport import Transport, abort
from opensmd.modelparallel.runtime.microbatch import Microbatch

__all__ = ["Explained", "StepErrors", "located", "stopped"]


class Explained:
    """Name the step in what the process group raises in the body, outside microbatches.

    A class because every step enters two of them, and contextlib would create generators.

    Args:
        function: the user's step function.
        moment: the moment in the step, as a clause.
        group: the pipeline's, on which no further step may run.

    Raises:
        SMPError: in place of a DistBackendError.
    """

    __slots__ = ("_function", "_group", "_moment")

    def __init__(self, function: Callable[..., Any], moment: str, group: dist.ProcessGroup) -> None:
        self._function, self._moment, self._group = function, moment, group

    def __enter__(self) -> Explained:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, DistBackendError):
            return
        poison(self._group, "a step")
        name = getattr(self._function, "__qualname__", repr(self._function))
        raise SMPError(f"the step {name!r} stopped {self._moment}: {error}") from error


def stopped(error: DistBackendError, microbatches: Iterable[tuple[Microbatch, Progress]]) -> SMPError:
    """Return the error of a rank that waits for messages, with what each microbatch was waiting for."""
    waiting = [
        f"microbatch {microbatch.index} {progress.value} for {microbatch.point}"
        for microbatch, progress in microbatches
        if progress not in (Progress.NEW, Progress.DONE)
    ]
    return SMPError(f"the pipeline stopped: {'; '.join(waiting)}. {_in_words(error)}")


def located(error: BaseException, microbatch: Microbatch) -> BaseException:
    """Return the error of a running microbatch; if it is the process group's, with where that was."""
    if not isinstance(error, DistBackendError):
        return error
    step_error = SMPError(
        f"the pipeline stopped: microbatch {microbatch.index} was at {microbatch.point}. {_in_words(error)}"
    )
    step_error.__cause__ = error
    return step_error


def _in_words(error: DistBackendError) -> str:
    """Return what the process group says, and the possible cause of a timeout."""
    if "timed out" not in str(error).lower():  # torch has no separate class for it
        return str(error)
    return (
        f"{error}. If all ranks run, they have taken different ways through the step function: call "
        "modules and ask for values on all ranks alike, and keep what goes from one microbatch to the next, "
        "such as a counter, in a buffer (register_buffer), or set active_microbatches to 1"
    )


class StepErrors:
    """The first error of an engine's steps, after which none may run; it is raised on all ranks.

    Ranks of other pipelines raise when they wait for one of this.

    Args:
        group: the pipeline's ranks.
        transport: the one to the other ranks.
        others: the other ranks in the group.
        across: returns the groups in which ranks of other pipelines may wait for this one.
        in_order: whether all ranks do everything in one order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        transport: Transport,
        others: list[int],
        across: Callable[[], Iterable[dist.ProcessGroup]],
        *,
        in_order: bool,
    ) -> None:
        self._group = group
        self._transport = transport
        self._others = others
        self._across = across
        self._in_order = in_order
        self._control_device = control_device(group)
        self._failure: str | None = None

    def __bool__(self) -> bool:
        return self._failure is not None

    def require_none(self) -> None:
        """Raise before a step if an earlier one, or anything else on its group, has failed.

        Raises:
            SMPError: something has failed.
        """
        if self._failure is not None:
            raise SMPError(f"an earlier step of this pipeline failed, and it cannot go on: {self._failure}")
        require_sound(self._group)

    def add(self, error: BaseException, where: str = "") -> None:
        """Note ``error`` as the end of all steps, and announce it to the others, once.

        Args:
            error: that of a step on this rank.
            where: where it was raised, as a clause.
        """
        if self._failure is not None:
            return
        self._failure = f"{type(error).__name__}: {error}"
        poison(self._group, "a step")
        if isinstance(error, PeerFailed):  # the rank that failed first has told all of the pipeline
            self._tell_other_pipelines(str(error))
            return
        stage = dist.get_rank(self._group)
        rank = dist.get_global_rank(self._group, stage)
        text = f"rank {rank} (pipeline rank {stage}) failed{where}: {self._failure}"
        abort(self._transport, self._others, text)
        self._tell_other_pipelines(text)

    def _tell_other_pipelines(self, text: str) -> None:
        for group in self._across():
            if group.size() > 1:
                abort_with(group, text)

    @contextlib.contextmanager
    def alike(self, *, confirm: bool) -> Iterator[None]:
        """Raise what the body raises on one rank on all, at the latest when they start their next step.

        Args:
            confirm: already at the end of the body, where every rank then waits.

        Raises:
            PeerFailed: the body failed on another rank.
        """
        try:
            yield
        except BaseException as error:
            self.add(error)
            # In a fixed order, the others may wait for any message of this rank and would not get here; a
            # KeyboardInterrupt should end this process at once.
            if confirm and isinstance(error, Exception) and not self._in_order:
                with contextlib.suppress(RuntimeError):
                    self._confirm(ended=False)
            raise
        if confirm and not self._confirm(ended=True):
            try:
                self._transport.require_no_abort()
                raise PeerFailed("another rank of the pipeline failed at the end of this step")
            except PeerFailed as error:
                self.add(error)
                raise

    def _confirm(self, *, ended: bool) -> bool:
        """Whether all ranks ended this step successfully."""
        mine = torch.tensor([ended], dtype=torch.int64, device=self._control_device)
        return bool(gathered_vectors(mine, self._group).all())

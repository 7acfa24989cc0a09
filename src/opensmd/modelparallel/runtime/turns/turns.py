"""The microbatches of a rank take turns: one of them runs at a time.

A microbatch keeps the thread in which it began as long as the user's function runs, whose stack that is. The
first begins in the thread that called the step. A thread whose microbatch has ended, or has only its backward
left, goes on with another one, so that a rank which never waits in mid-course never changes threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial

from torch.distributed import DistBackendError

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.schedule import Policy, Progress
from opensmd.modelparallel.runtime.messages.transport import Message, Transport
from opensmd.modelparallel.runtime.side_effects.per_microbatch import Own
from opensmd.modelparallel.runtime.turns.record import Record
from opensmd.modelparallel.runtime.turns.thread_state import ThreadState
from opensmd.modelparallel.runtime.turns.threads import Threads

__all__ = ["StepAborted", "Turns"]

_NEW, _RUNNING, _FORWARD, _AT_BACKWARD, _BACKWARD, _DONE = Progress  # Enum members are slow to reach


class StepAborted(BaseException):
    """Ends a microbatch that waits when another one of the step has failed."""


class _Worker:
    """A thread that can begin microbatches, and its way to be woken."""

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.task: int | None = None


class Turns:
    """Runs the microbatches of one step.

    Args:
        count: of microbatches.
        policy: which goes on.
        transport: says what has come.
        begin: runs one microbatch to its end, which returns None; or up to a backward that it defers, which
            returns the messages of which that waits for one. Called again, it goes on with this backward.
        held: whether a microbatch must wait before its backward for others of this rank.
        idle: called when nothing can go on; whether it has done something instead of waiting.
        record: told of what ran when.
        threads: where further microbatches run.
        explain: what a microbatch waits for, in words.
        own: what microbatches have to themselves.

    Attributes:
        error: the first of any microbatch, or of waiting for messages.
        failed: the microbatch that raised it; None for an error of waiting.
    """

    def __init__(
        self,
        count: int,
        *,
        policy: Policy,
        transport: Transport,
        begin: Callable[[int], list[Message] | None],
        held: Callable[[int, Sequence[Progress]], bool],
        idle: Callable[[], bool],
        record: Record,
        threads: Threads,
        explain: Callable[[int], str],
        own: Own,
    ) -> None:
        self.progress = [_NEW] * count
        self._left = count
        self.error: BaseException | None = None
        self.failed: int | None = None
        self._policy = policy
        self._transport = transport
        self._begin = begin
        self._held = held
        self._idle_work = idle
        self._record = record
        self._explain = explain
        self._own = own
        self._messages: list[Sequence[Message]] = [()] * count
        self._until: list[Callable[[], bool] | None] = [None] * count
        self._threads_of_rank = threads
        self._workers: list[_Worker | None] = [None] * count
        self._idle: list[_Worker] = []
        self._main = _Worker()
        self._state = ThreadState.of_this_thread()
        self._context = copy_context()

    def run(self) -> None:
        """Run all microbatches; the first error of any ends them all and is raised."""
        self._idle.append(self._main)
        first = self._next()
        if first is not None:
            self._idle.remove(self._main)
            self._work(self._main, first)
        for worker in self._idle:
            if worker is not self._main:
                worker.task = None
                worker.wake.release()
        if self.error is not None:
            raise self.error

    def wait(self, microbatch: int, messages: list[Message], until: Callable[[], bool] | None) -> None:
        """Let others go on until one of ``messages`` has come, or ``until`` holds."""
        if self._policy.waits_in_place:
            if messages:
                self._wait_for(messages)
            return
        backward = self._record.kind == "backward"
        self._suspend(microbatch, _BACKWARD if backward else _FORWARD, messages, until)

    def forwards_before(self, microbatch: int) -> bool:
        """Whether all earlier microbatches have been through their forwards on this rank."""
        return all(each not in (_NEW, _RUNNING, _FORWARD) for each in self.progress[:microbatch])

    def before_backward(self, microbatch: int, messages: list[Message]) -> None:
        """Let others go on before a backward; ``messages`` are those that it would wait for at once."""
        self._suspend(microbatch, _AT_BACKWARD, messages, None)

    def is_first(self, microbatch: int, messages: list[Message]) -> bool:
        """Whether a backward, which would wait for ``messages`` at once, comes before everything else."""
        self._set(microbatch, _AT_BACKWARD, messages)
        chosen = self._pick()
        self._set(microbatch, _RUNNING)
        return chosen == microbatch

    def _set(
        self,
        microbatch: int,
        progress: Progress,
        messages: Sequence[Message] = (),
        until: Callable[[], bool] | None = None,
    ) -> None:
        """Where a microbatch is, and what it waits for."""
        self.progress[microbatch] = progress
        self._messages[microbatch] = messages
        self._until[microbatch] = until

    def _suspend(
        self,
        microbatch: int,
        progress: Progress,
        messages: list[Message],
        until: Callable[[], bool] | None,
    ) -> None:
        kind = self._record.kind
        self._record.end()
        self._set(microbatch, progress, messages, until)
        chosen = self._next()
        if chosen != microbatch:
            worker = self._workers[microbatch]
            assert worker is not None
            self._own.suspend(microbatch)
            self._hand_over(chosen)
            worker.wake.acquire()
            self._own.resume(microbatch)
        if self.error is not None:
            raise StepAborted
        self._set(microbatch, _RUNNING)
        self._record.begin(microbatch, kind)

    def _hand_over(self, chosen: int | None) -> None:
        """Wake the thread of the chosen microbatch, or give it one; None wakes the main thread at the end."""
        if chosen is None:
            self._main.task = None
            self._main.wake.release()
            return
        worker = self._workers[chosen]
        if worker is not None:
            worker.wake.release()
            return
        if not self._idle:
            self._idle.append(self._start())
        worker = self._idle.pop()
        worker.task = chosen
        worker.wake.release()

    def _start(self) -> _Worker:
        worker = _Worker()

        def live() -> None:
            worker.wake.acquire()
            while worker.task is not None:
                self._work(worker, worker.task)
                worker.wake.acquire()

        def with_state() -> None:
            with self._state.restored():
                live()

        self._threads_of_rank.start(partial(self._context.copy().run, with_state))
        return worker

    def _work(self, worker: _Worker, microbatch: int | None) -> None:
        """Run microbatches in this thread as long as new ones are chosen; then hand the turn over."""
        while microbatch is not None:
            self._workers[microbatch] = worker
            backward = self.progress[microbatch] is _AT_BACKWARD
            self._set(microbatch, _RUNNING)
            self._record.begin(microbatch, "backward" if backward else "forward")
            awaited: list[Message] | None = None
            try:
                self._own.begin(microbatch, backward=backward)
                awaited = self._begin(microbatch)
                self._own.end(microbatch, backward_left=awaited is not None)
            except BaseException as error:
                if self.error is None:  # a StepAborted follows the error that aborted the step
                    self.error, self.failed = self._located(error, microbatch), microbatch
            self._record.end()
            if awaited is None:
                self._set(microbatch, _DONE)
                self._left -= 1
            else:
                self._set(microbatch, _AT_BACKWARD, awaited)
                self._workers[microbatch] = None
            chosen = self._next()
            if chosen is not None and self._workers[chosen] is None:
                microbatch = chosen
                continue
            if worker is not self._main:
                self._idle.append(worker)
                self._hand_over(chosen)
                return
            if chosen is None:
                return
            self._idle.append(worker)
            self._hand_over(chosen)
            worker.wake.acquire()
            microbatch = worker.task

    def _next(self) -> int | None:
        """The microbatch that goes on; None at the end of the step."""
        while True:
            if self.error is not None:
                return self._next_to_abort()
            if self._left == 0:
                return None
            try:
                chosen = self._pick()
                if chosen is not None:
                    return chosen
                if not self._idle_work():
                    self._wait_for_any()
            except BaseException as error:
                self.error = error

    def _pick(self) -> int | None:
        """The first of the microbatches that can go on."""
        try:
            return self._policy.pick(self.progress, self._can_go_on)
        except DistBackendError as error:  # the group has been aborted
            raise self._told(error) from error

    def _next_to_abort(self) -> int | None:
        for microbatch, progress in enumerate(self.progress):
            if progress not in (_DONE, _NEW, _RUNNING) and self._workers[microbatch] is not None:
                return microbatch
        return None

    def _can_go_on(self, microbatch: int) -> bool:
        if self._waits_for_others(microbatch):
            return False
        until, messages = self._until[microbatch], self._messages[microbatch]
        if until is not None and until():
            return True
        for message in messages:
            if self._transport.ready(message):
                return True
        return not messages and until is None

    def _waits_for_others(self, microbatch: int) -> bool:
        return self.progress[microbatch] is _AT_BACKWARD and self._held(microbatch, self.progress)

    def _wait_for_any(self) -> None:
        messages = [
            message
            for microbatch, awaited in enumerate(self._messages)
            if awaited and not self._waits_for_others(microbatch)
            for message in awaited
        ]
        assert messages, self.progress
        self._record.begin(-1, "wait")
        try:
            self._wait_for(messages)
        finally:
            self._record.end()

    def _wait_for(self, messages: Sequence[Message]) -> None:
        try:
            self._transport.wait_any(messages)
        except DistBackendError as error:
            raise self._told(error) from error

    def _located(self, error: BaseException, microbatch: int) -> BaseException:
        """The error of a running microbatch; the transport's with where that was."""
        if not isinstance(error, DistBackendError):
            return error
        told = SMPError(
            f"the pipeline stopped: microbatch {microbatch} was at {self._explain(microbatch)}. {error}"
        )
        told.__cause__ = error
        return told

    def _told(self, error: DistBackendError) -> SMPError:
        """The transport's error, with what each microbatch was waiting for."""
        waiting = [
            f"microbatch {microbatch} {progress.value} for {self._explain(microbatch)}"
            for microbatch, progress in enumerate(self.progress)
            if progress not in (_NEW, _DONE)
        ]
        return SMPError(f"the pipeline stopped: {'; '.join(waiting)}. {error}")

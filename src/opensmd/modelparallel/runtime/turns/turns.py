"""The microbatches of a rank take turns: one of them runs at a time.

Three stages, four microbatches, forwards of one tick and backwards of two; ``Fi`` and ``Bi`` are those of
microbatch i, a dot is an idle tick::

    rank 0   F0 F1 F2 F3 .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3
    rank 1   .  F0 F1 F2 .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

A microbatch passes on its turn when it needs a tensor that has not arrived, or comes to a backward. A policy
in ``candidates.py`` chooses who continues. The unit tests simulate whole pipelines in one process and compare
them with tables.

A microbatch keeps its initial thread, with its stack, as long as the user's function runs. The first starts
in the thread that called the step. A thread whose microbatch has ended, or has only its backward left,
continues with another one, so a rank that never waits inside a function never changes threads::

    thread of the step   F0 ── F1 ── waits in F1 ........... (F1) ── B0 ── B1
                                     └─ wakes                ↑
    a further thread                    F2 ── F2 returns ────┘
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from contextvars import copy_context
from functools import partial

from opensmd.modelparallel.planning.policies.patience import Patience
from opensmd.modelparallel.planning.policies.policy import Policy, Progress
from opensmd.modelparallel.runtime.messages.message import Message
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.step_errors import located
from opensmd.modelparallel.runtime.turns.candidates import IN_FORWARD, Candidates
from opensmd.modelparallel.runtime.turns.parts import Arrivals, Run, SwappedState, Waiting, WeightWork
from opensmd.modelparallel.runtime.turns.record import Record
from opensmd.modelparallel.runtime.turns.thread_state import ThreadState
from opensmd.modelparallel.runtime.turns.threads import Threads

__all__ = ["StepAborted", "Turns"]

# Enum members are slow to look up
_NEW, _RUNNING, _FORWARD, _AT_FORWARD, _AT_BACKWARD, _BACKWARD, _DONE = Progress


class StepAborted(BaseException):
    """Ends a waiting microbatch when another one of the step has failed."""


class _Worker:
    """A thread that can start microbatches, and how to wake it."""

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.task: int | None = None


class Turns:
    """Decides which microbatch of a step runs.

    Args:
        microbatches: the number in the step.
        policy: chooses which continues.
        arrivals: tells what has come.
        weight_work: what backwards have left for later.
        record: notes what ran when.
        threads: for further microbatches.
        swapped_state: what each microbatch has to itself.
        patience: how long it is worth waiting for the policy's first choice.

    Attributes:
        error: the first of any microbatch, or of waiting for messages.
        failed: the microbatch that raised it; None for an error of waiting.
        chunked: whether microbatches pass this rank several times, and yield before each.
    """

    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        *,
        policy: Policy,
        arrivals: Arrivals,
        weight_work: WeightWork,
        record: Record,
        threads: Threads,
        swapped_state: SwappedState,
        patience: Patience,
    ) -> None:
        count = len(microbatches)
        self._candidates = Candidates(microbatches, policy, arrivals, weight_work.left, record, patience)
        self._candidates.first_alone = swapped_state.watches_first
        self._progress = self._candidates.progress
        self.chunked = self._candidates.chunked
        self.error: BaseException | None = None
        self.failed: Microbatch | None = None
        self._microbatches = microbatches
        self._runs: Sequence[Run] = ()
        self._left = count
        self._over = False
        self._waits_in_place = policy.waits_in_place
        self._weight_work = weight_work
        self._record = record
        self._swapped_state = swapped_state
        self._threads_of_rank = threads
        self._workers: list[_Worker | None] = [None] * count
        self._idle: list[_Worker] = []
        self._main = _Worker()
        self._thread_state = ThreadState.of_this_thread()
        self._context = copy_context()

    # --- what microbatches ask for ---------------------------------------------------------------------

    def at_wait(self) -> None:
        """Note that microbatches may wait here, whether or not the running one has to."""
        if self._candidates.first_alone:
            self._swapped_state.watch_first()

    def at_backward(self, microbatch: Microbatch) -> None:
        """Note that a microbatch asks for a backward."""
        # Others may now begin when it waits, because what it waits for may depend on them by some schedules.
        if microbatch.index == 0:
            self._candidates.first_alone = False

    def wait(
        self, microbatch: Microbatch, messages: list[Message], until: Callable[[], bool] | None = None
    ) -> None:
        """Let others run until one of ``messages`` has come, or ``until`` holds."""
        # In a fixed order, no other may run meanwhile: every turn comes where the order says.
        if self._waits_in_place:
            if messages:
                self._candidates.wait_for(messages)
            return
        backward = self._record.kind == "backward"
        self._suspend(microbatch.index, _BACKWARD if backward else _FORWARD, messages, until)

    def wait_for_earlier(self, microbatch: Microbatch, call: Hashable = None) -> None:
        """Let others run until all earlier microbatches have completed their forwards on this rank.

        Earlier ones that have already made ``call`` as often as this one is about to need not.
        """
        self.at_wait()
        have_gone = self._candidates.earlier_have_made(microbatch.index, call)
        if not have_gone():
            self.wait(microbatch, [], have_gone)
        if call is not None:
            self._candidates.count_call(microbatch.index, call)

    def before_chunk(self, microbatch: Microbatch, messages: list[Message]) -> None:
        """Let others run before a further part of a forward, which starts with one of ``messages``."""
        self.at_wait()
        if not self._candidates.would_pick(microbatch.index, _AT_FORWARD, messages):
            self._suspend(microbatch.index, _AT_FORWARD, messages, None)

    def before_backward(self, microbatch: Microbatch, messages: list[Message]) -> None:
        """Let others run before a backward; ``messages`` are those that it would immediately wait for."""
        self._suspend(microbatch.index, _AT_BACKWARD, messages, None)

    def is_first(self, microbatch: Microbatch, messages: list[Message]) -> bool:
        """Whether a backward, which would immediately wait for ``messages``, comes before everything else."""
        return self._candidates.would_pick(microbatch.index, _AT_BACKWARD, messages)

    # --- the course of a step --------------------------------------------------------------------------

    def run(self, runs: Sequence[Run]) -> None:
        """Run all microbatches, ``runs`` in their order; the first error ends all and is raised."""
        self._runs = runs
        self._idle.append(self._main)
        first = self._next()
        try:
            if first is not None:
                self._idle.remove(self._main)
                self._work(self._main, first)
        except BaseException as error:  # an interrupt of this thread, while another one has the turn
            self.error = self.error or error
        self._runs = ()  # they refer back to this object, and their memory should not wait for the collector
        self._over = True  # first: an interrupted step may leave a thread that still runs, and is idle later
        for worker in self._idle:
            if worker is not self._main:
                worker.task = None
                worker.wake.release()
        if self.error is not None:
            raise self.error

    def _suspend(
        self, index: int, progress: Progress, messages: list[Message], until: Callable[[], bool] | None
    ) -> None:
        kind = self._record.kind
        self._record.end()
        self._candidates.put(index, progress, messages, until)
        chosen = self._next(inside=index)
        if chosen != index:
            worker = self._workers[index]
            assert worker is not None  # that of the calling thread
            # State changes only while no other thread runs: before the turn is passed on, and after it has
            # come back.
            self._swapped_state.suspend(index, through=progress not in IN_FORWARD)
            self._hand_over(chosen)
            worker.wake.acquire()
            self._swapped_state.resume(index)
        # The turn may have come back only for this thread to unwind its stack, which no other can do.
        if self.error is not None:
            raise StepAborted
        self._progress[index] = _RUNNING
        self._record.begin(index, kind)

    def _hand_over(self, chosen: int | None) -> None:
        """Wake the chosen microbatch's thread, or give it one; None wakes the main thread at the end."""
        if chosen is None:
            self._main.task = None
            with contextlib.suppress(RuntimeError):  # released already: two threads end an interrupted step
                self._main.wake.release()
            return
        worker = self._workers[chosen]
        if worker is not None:  # its function's stack is there, so it cannot continue elsewhere
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
                if self._over:
                    return
                worker.wake.acquire()

        def with_state() -> None:
            with self._thread_state.restored():
                live()

        # A copy per thread, because a context cannot be entered while another thread is in it.
        self._threads_of_rank.start(partial(self._context.copy().run, with_state))
        return worker

    def _work(self, worker: _Worker, index: int | None) -> None:
        """Run microbatches in this thread as long as new ones are chosen; then pass the turn on.

        There are three ways out of the loop. If the chosen microbatch has a thread, this one wakes it, and is
        idle until it gets another. If the step has ended, the main thread returns from here to the caller of
        the step, and any other wakes the main thread. And the main thread, which must not return earlier,
        sleeps here instead of outside.
        """
        while index is not None:
            self._workers[index] = worker
            self._advance(index)
            chosen = self._next()
            if chosen is not None and self._workers[chosen] is None:
                index = chosen
                continue
            if worker is not self._main:
                self._idle.append(worker)  # before the turn is passed on: its holder may take this one
                self._hand_over(chosen)
                return
            if chosen is None:
                return
            self._idle.append(worker)
            self._hand_over(chosen)
            worker.wake.acquire()
            index = worker.task

    def _advance(self, index: int) -> None:
        """Run a microbatch until its stack is no longer needed."""
        backward = self._progress[index] is _AT_BACKWARD
        self._progress[index] = _RUNNING
        self._record.begin(index, "backward" if backward else "forward")
        awaited: Sequence[Message] | None = None
        try:
            self._swapped_state.begin(index, backward=backward)
            outcome = self._runs[index].advance()
            if isinstance(outcome, Waiting):
                awaited = outcome.messages
            self._swapped_state.end(index, backward_left=awaited is not None)
        except BaseException as error:
            if self.error is None:  # a StepAborted is a consequence of the first error
                microbatch = self._microbatches[index]
                self.error, self.failed = located(error, microbatch), microbatch
        self._record.end()
        if awaited is None:
            self._candidates.end(index)
            self._left -= 1
        else:
            self._candidates.put(index, _AT_BACKWARD, awaited)
            self._workers[index] = None  # the function has returned, so any thread may run the backward

    # --- who is next -----------------------------------------------------------------------------------

    def _next(self, inside: int | None = None) -> int | None:
        """Choose the microbatch that continues; None at the end of the step.

        Args:
            inside: the microbatch whose function has called this, deep in its stack.
        """
        while True:
            if self.error is not None:
                return self._next_to_abort()
            if self._left == 0:
                return None
            try:
                choice = self._candidates.pick()
                if choice is None:
                    self._candidates.wait_for_any()
                elif choice.instead_of is not None and self._candidates.comes_in_time(choice.instead_of):
                    continue
                elif choice.weights is None:
                    return choice.microbatch
                else:
                    self._compute_weights(choice.microbatch, choice.weights, inside)
            except BaseException as error:
                self.error = error

    def _compute_weights(self, microbatch: int, chunk: int, inside: int | None) -> None:
        """Compute pending weight gradients, perhaps inside a waiting microbatch's function."""
        # A reentrant checkpoint starts its own backward, not the waiting function's.
        waiting = None if inside is None else self._microbatches[inside]
        with contextlib.nullcontext() if waiting is None else waiting.not_intercepted():
            self._weight_work.run(microbatch, chunk)

    def _next_to_abort(self) -> int | None:
        """Return a microbatch whose function waits; it gets a StepAborted, which frees its thread."""
        for index, progress in enumerate(self._progress):
            if progress not in (_DONE, _NEW, _RUNNING) and self._workers[index] is not None:
                return index
        return None

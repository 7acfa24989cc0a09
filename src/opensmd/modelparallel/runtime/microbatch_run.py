"""One microbatch's pass through the user's step function on this rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any

from opensmd.modelparallel.runtime.backward.backward_pass import BackwardPass
from opensmd.modelparallel.runtime.calls.call_runner import CallRunner
from opensmd.modelparallel.runtime.calls.glue import Glue
from opensmd.modelparallel.runtime.calls.interception import set_run
from opensmd.modelparallel.runtime.calls.transfers import Transfers
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.results import Results
from opensmd.modelparallel.runtime.turns.parts import Done, Waiting
from opensmd.modelparallel.runtime.turns.turns import Turns

__all__ = ["MicrobatchRun"]

_DONE = Done()


class MicrobatchRun:
    """Runs the step function for one microbatch, and then what it has left for later.

    Args:
        microbatch: which one.
        function: the step function, with its arguments bound.
        context: what the microbatches of a pipeline have in common.
        turns: decides which microbatch runs.
        backward_pass: that of the step.
        results: take what the function returns.
    """

    def __init__(
        self,
        microbatch: Microbatch,
        function: Callable[[], Any],
        context: PipelineContext,
        turns: Turns,
        backward_pass: BackwardPass,
        results: Results,
    ) -> None:
        self._microbatch = microbatch
        self._function = function
        self._backward_pass = backward_pass
        self._results = results
        transfers = Transfers(microbatch, context, turns, backward_pass)
        self._calls = CallRunner(microbatch, context, transfers, turns, backward_pass)
        # A generator, because its halves may run in different threads: what the function leaves for later
        # needs no stack.
        self._course = self._run()

    def advance(self) -> Waiting | Done:
        """Continue as long as the user's function, or what it has left, needs the thread's stack.

        Waits inside keep this stack; what is returned waits without one.
        """
        return next(self._course, _DONE)

    def abandon(self) -> None:
        """Release everything, wherever the microbatch is, because the step has failed."""
        # An interrupt ends the step at once, though another thread may have the turn, which then ends alone.
        if inspect.getgeneratorstate(self._course) != inspect.GEN_RUNNING:
            self._course.close()
            self._release()

    def _run(self) -> Generator[Waiting, None, None]:
        value = self._call_function()
        # Before the deferred backward: large results travel while that waits for its gradient.
        self._results.share(self._microbatch.index, value)
        while self._microbatch.deferred is not None:
            # The function's stack is gone, so any thread may continue after this.
            yield Waiting(self._microbatch.deferred.awaited)
            self._backward_pass.run_deferred(self._microbatch)
        self._microbatch.require_gradients_sent()
        self._release()

    def _release(self) -> None:
        self._microbatch.release()
        self._calls.release()

    def _call_function(self) -> Any:
        set_run(self._calls)  # by thread, because calls of modules do not name the microbatch
        try:
            with Glue(self._calls) as self._microbatch.mode:
                return self._function()
        finally:
            set_run(None)

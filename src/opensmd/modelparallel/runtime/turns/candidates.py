"""Which microbatch of a rank continues: where each is, what each waits for, and the choice among them.

The policy chooses by its own order, and asks whether its preferred microbatches can continue::

    Turns ── pick ──► Candidates ── pick(standing, can go on?) ──► Policy
                          │                                           │
                      Arrivals ◄── has a message come? ◄──────────────┘

If none can, the rank waits for the messages of exactly those that were asked for. ``turns.py`` handles
threads and errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from torch.distributed import DistBackendError

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.policies.patience import Patience
from opensmd.modelparallel.planning.policies.policy import Choice, Policy, Progress, Standing
from opensmd.modelparallel.planning.schedules.tables import Action
from opensmd.modelparallel.runtime.messages.message import Message
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.step_errors import stopped
from opensmd.modelparallel.runtime.turns.parts import Arrivals
from opensmd.modelparallel.runtime.turns.record import Record

__all__ = ["IN_FORWARD", "Candidates"]

# Enum members are slow to look up
_NEW, _RUNNING, _FORWARD, _AT_FORWARD, _AT_BACKWARD, _BACKWARD, _DONE = Progress
IN_FORWARD = (_NEW, _RUNNING, _FORWARD, _AT_FORWARD)


class Candidates:
    """The microbatches of one step, and the choice of which continues.

    Args:
        microbatches: the number in the step.
        policy: chooses.
        arrivals: tells what has come.
        weights_left: the microbatches and chunks with pending weight gradients; changes during the step.
        record: notes when the rank waits.
        patience: how long it is worth waiting for the policy's first choice.

    Attributes:
        progress: how far each microbatch has come.
        chunked: whether microbatches pass this rank several times.
        first_alone: whether no other microbatch begins before the first one's forward is complete.
    """

    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        policy: Policy,
        arrivals: Arrivals,
        weights_left: Sequence[tuple[int, int]],
        record: Record,
        patience: Patience,
    ) -> None:
        count = len(microbatches)
        self.progress = [_NEW] * count
        self.chunked = policy.chunks > 1
        self.first_alone = False
        self._microbatches = microbatches
        self._policy = policy
        self._chunks = [0] * count
        self._standing = Standing(self.progress, self._chunks, weights_left)
        self._arrivals = arrivals
        self._record = record
        self._patience = patience
        self._given_up: Action | None = None  # the latest action that was waited for in vain
        self._messages: list[Sequence[Message]] = [()] * count
        self._until: list[Callable[[], bool] | None] = [None] * count
        self._refused: list[int] = []  # by the latest choice, because their messages had not come
        self._calls: Counter[tuple[int, Hashable]] = Counter()  # of microbatches, if their order matters

    def put(
        self,
        index: int,
        progress: Progress,
        messages: Sequence[Message] = (),
        until: Callable[[], bool] | None = None,
    ) -> None:
        """Store a suspended microbatch's progress, and what it waits for."""
        self.progress[index] = progress
        if self.chunked:
            self._chunks[index] = self._microbatches[index].chunk
        self._messages[index] = messages
        self._until[index] = until

    def end(self, index: int) -> None:
        """Note that a microbatch has ended."""
        self.progress[index] = _DONE
        self._until[index] = None  # it may refer to objects of the step

    def pick(self) -> Choice | None:
        """Choose what comes next of all that can continue."""
        self._refused.clear()
        try:
            if self.first_alone and self.progress[0] in (_FORWARD, _AT_FORWARD):
                return Choice(0) if self._can_go_on(0) else None
            return self._policy.pick(self._standing, self._can_go_on)
        except DistBackendError as error:  # the group has been aborted
            raise self._stopped(error) from error

    def would_pick(self, index: int, progress: Progress, messages: Sequence[Message]) -> bool:
        """Whether the running microbatch would come next if it waited there for ``messages``."""
        if messages and not self._has_come(messages):
            return False
        # As if it waited, because the policy chooses among waiting ones.
        self.put(index, progress, messages)
        choice = self.pick()
        self.progress[index] = _RUNNING
        return choice == Choice(index)

    def earlier_have_made(self, index: int, call: Hashable) -> Callable[[], bool]:
        """Return a check that each earlier microbatch has ended its forward or made ``call`` more often."""
        calls, own = self._calls, self._calls[index, call]

        def have_made() -> bool:
            earlier = enumerate(self.progress[:index])
            return all(progress not in IN_FORWARD or calls[other, call] > own for other, progress in earlier)

        return have_made

    def count_call(self, index: int, call: Hashable) -> None:
        """Note that a microbatch makes ``call``, whose order matters."""
        self._calls[index, call] += 1

    def wait_for_any(self) -> None:
        """Wait until one of those that :meth:`pick` has asked for can continue."""
        # Only for those: the message of a held one may already be there, and waiting for it would not wait at
        # all. A message that has come since ends the wait at once.
        messages = [
            message
            for index in self._refused
            if not self._is_held(index)
            for message in self._messages[index]
        ]
        assert messages, list(self.progress)
        self._wait_idle(messages)

    def comes_in_time(self, action: Action) -> bool:
        """Wait briefly for what an action needs, once."""
        seconds, messages = self._patience.seconds, self._messages[action.microbatch]
        in_vain = action == self._given_up or self._is_held(action.microbatch)
        if in_vain or not (seconds and messages):
            return False
        self._given_up = action
        came = self._wait_idle(messages, seconds)
        self._patience.has_waited(came=came)
        return came

    def wait_for(self, messages: Sequence[Message], at_most: float | None = None) -> bool:
        """Wait for a message, or so many seconds; return whether one has come."""
        try:
            if at_most is not None:
                return self._arrivals.comes_within(messages, at_most)
            self._arrivals.wait_any(messages)
            return True
        except DistBackendError as error:
            raise self._stopped(error) from error

    def _wait_idle(self, messages: Sequence[Message], at_most: float | None = None) -> bool:
        """Wait with nothing else to do; return whether one has come."""
        self._record.begin(-1, "wait")
        try:
            return self.wait_for(messages, at_most)
        finally:
            self._record.end()

    def _can_go_on(self, index: int) -> bool:
        if not self._is_held(index):
            until, messages = self._until[index], self._messages[index]
            # Another microbatch may have brought about what it waits for, without a message.
            if self._has_come(messages) or (not messages if until is None else until()):
                return True
        self._refused.append(index)
        return False

    def _has_come(self, messages: Sequence[Message]) -> bool:
        return any(map(self._arrivals.ready, messages))

    def _is_held(self, index: int) -> bool:
        """Whether a backward must wait for others, whatever has come."""
        return self.progress[index] is _AT_BACKWARD and self._policy.holds(index, self.progress)

    def _stopped(self, error: DistBackendError) -> SMPError:
        return stopped(error, zip(self._microbatches, self.progress, strict=True))

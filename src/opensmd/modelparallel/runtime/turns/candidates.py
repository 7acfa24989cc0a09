"""Which microbatch of a rank goes on: where each is, what each waits for, and the choice among them.

The policy chooses by its own order, and asks of each that it would like whether that can go on::

    Turns ── pick ──► Candidates ── pick(standing, can go on?) ──► Policy
                          │                                           │
                      Arrivals ◄── has a message come? ◄──────────────┘

Where nothing can go on, the rank waits for the messages of exactly those that were asked for. Threads and
errors are the business of ``turns.py``.
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

# Enum members are slow to reach
_NEW, _RUNNING, _FORWARD, _AT_FORWARD, _AT_BACKWARD, _BACKWARD, _DONE = Progress
IN_FORWARD = (_NEW, _RUNNING, _FORWARD, _AT_FORWARD)


class Candidates:
    """The microbatches of one step, as far as it is to be decided which goes on.

    Args:
        microbatches: of the step.
        policy: chooses.
        arrivals: says what has come.
        weights_left: of which microbatches and chunks weight gradients are left; changes as the step goes on.
        record: notes when the rank waits.
        patience: how long it is worth waiting for what the policy would have chosen first.

    Attributes:
        progress: how far each microbatch has come.
        chunked: microbatches come to this rank several times.
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
        self._microbatches = microbatches
        self._policy = policy
        self._chunks = [0] * count
        self._standing = Standing(self.progress, self._chunks, weights_left)
        self._arrivals = arrivals
        self._record = record
        self._patience = patience
        self._given_up: Action | None = None  # the latest that patience was in vain for
        self._messages: list[Sequence[Message]] = [()] * count
        self._until: list[Callable[[], bool] | None] = [None] * count
        self._refused: list[int] = []  # by the latest choice, as what they wait for had not come
        self._calls: Counter[tuple[int, Hashable]] = Counter()  # of microbatches, where their order counts

    def put(
        self,
        index: int,
        progress: Progress,
        messages: Sequence[Message] = (),
        until: Callable[[], bool] | None = None,
    ) -> None:
        """A microbatch does not run: where it is, and what it waits for."""
        self.progress[index] = progress
        if self.chunked:
            self._chunks[index] = self._microbatches[index].chunk
        self._messages[index] = messages
        self._until[index] = until

    def end(self, index: int) -> None:
        """A microbatch has ended."""
        self.progress[index] = _DONE
        self._until[index] = None  # which may refer to what the step has made

    def pick(self) -> Choice | None:
        """What comes next of all that can go on."""
        self._refused.clear()
        try:
            return self._policy.pick(self._standing, self._can_go_on)
        except DistBackendError as error:  # the group has been aborted
            raise self._stopped(error) from error

    def would_pick(self, index: int, progress: Progress, messages: Sequence[Message]) -> bool:
        """Whether the running microbatch would come next if it waited there for ``messages``."""
        if messages and not self._has_come(messages):
            return False
        # As if it waited: the policy chooses among those that wait, and this is to be one of them.
        self.put(index, progress, messages)
        choice = self.pick()
        self.progress[index] = _RUNNING
        return choice == Choice(index)

    def earlier_have_made(self, index: int, call: Hashable) -> Callable[[], bool]:
        """Tells whether each earlier microbatch is through its forward, or has made ``call`` more often."""
        calls, own = self._calls, self._calls[index, call]

        def have_made() -> bool:
            earlier = enumerate(self.progress[:index])
            return all(progress not in IN_FORWARD or calls[other, call] > own for other, progress in earlier)

        return have_made

    def count_call(self, index: int, call: Hashable) -> None:
        """A microbatch makes ``call``, of which the order counts."""
        self._calls[index, call] += 1

    def wait_for_any(self) -> None:
        """Wait until one of those can go on that :meth:`pick` has looked at."""
        # Of those alone that the choice has asked for: the message of one that is held may be there already,
        # and waiting for it would not wait at all. One that has come since ends the wait at once.
        messages = [
            message
            for index in self._refused
            if not self._is_held(index)
            for message in self._messages[index]
        ]
        assert messages, list(self.progress)
        self._wait_idle(messages)

    def comes_in_time(self, action: Action) -> bool:
        """Wait a little for what an action needs, once."""
        seconds, messages = self._patience.seconds, self._messages[action.microbatch]
        in_vain = action == self._given_up or self._is_held(action.microbatch)
        if in_vain or not (seconds and messages):
            return False
        self._given_up = action
        came = self._wait_idle(messages, seconds)
        self._patience.has_waited(came=came)
        return came

    def wait_for(self, messages: Sequence[Message], at_most: float | None = None) -> bool:
        """Wait until a message has come, or so many seconds, and say whether one has."""
        try:
            if at_most is not None:
                return self._arrivals.comes_within(messages, at_most)
            self._arrivals.wait_any(messages)
            return True
        except DistBackendError as error:
            raise self._stopped(error) from error

    def _wait_idle(self, messages: Sequence[Message], at_most: float | None = None) -> bool:
        """Wait where nothing else is done meanwhile, and say whether one has come."""
        self._record.begin(-1, "wait")
        try:
            return self.wait_for(messages, at_most)
        finally:
            self._record.end()

    def _can_go_on(self, index: int) -> bool:
        if not self._is_held(index):
            until, messages = self._until[index], self._messages[index]
            # What it waits for may have been brought about by another microbatch, without a message.
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

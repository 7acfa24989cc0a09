"""Exchanging descriptions: the home of a call tells the other ranks what it returns.

::

    the first call of its key       home ── DESCRIPTION, 26 bits of the key ──► kept for all calls like it
    a result that depends on data   home ── OBJECT, microbatch and number ────► for this call alone, each time

The first tag names no microbatch: whichever makes such a call first receives the description for all.
"""

from __future__ import annotations

from collections.abc import Hashable

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.calls.descriptions.description import Description
from opensmd.modelparallel.runtime.calls.transfers import Transfers
from opensmd.modelparallel.runtime.messages.message import Kind, make_tag
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.stable_hash import stable_hash

__all__ = ["DescriptionExchange"]


class DescriptionExchange:
    """What one microbatch announces about its calls here, and learns about those at other homes.

    Args:
        microbatch: whose calls these are.
        context: what the microbatches of a pipeline have in common.
        transfers: lets other microbatches run while this one waits.
    """

    def __init__(self, microbatch: Microbatch, context: PipelineContext, transfers: Transfers) -> None:
        self._microbatch = microbatch
        self._transfers = transfers
        self._transport = context.transport
        self._others = context.others
        self._known = context.calls.descriptions

    def receive(self, home: int, key: Hashable, number: int) -> Description:
        """Receive the description of a call at ``home``.

        Args:
            key: identifies equal calls.
            number: the call's program point.

        Raises:
            SMPError: the home runs a different program.
        """
        if key not in self._known:
            self._wait_until_known(home, key)
        known = self._known[key]
        if not known.depends_on_data:
            return known
        tag = self._tag_of_one(number)
        self._transfers.wait([(home, tag)])
        received: Description = self._transport.receive_object(home, tag)
        return received

    def send(self, description: Description, key: Hashable, number: int, *, is_new: bool) -> None:
        """Send the description of a call here to the others; see :meth:`receive`.

        Args:
            is_new: whether no call with this key was described before.
        """
        if is_new:
            for rank in self._others:
                self._transport.send_object(rank, _tag_of_all(key), (stable_hash(key, 64), description))
            self._known[key] = description
        if description.depends_on_data:
            for rank in self._others:
                self._transport.send_object(rank, self._tag_of_one(number), description)

    def _wait_until_known(self, home: int, key: Hashable) -> None:
        tag = _tag_of_all(key)
        while key not in self._known:
            # Another microbatch may receive it while this one waits.
            if not self._transport.ready((home, tag)):
                self._transfers.wait([(home, tag)], until=lambda: key in self._known)
                continue
            described_key, description = self._transport.receive_object(home, tag)
            # The tag has room for only 26 bits of the key.
            if described_key != stable_hash(key, 64):
                raise SMPError(
                    f"microbatch {self._microbatch.index}: pipeline rank {home} described another operation "
                    f"than {self._microbatch.point}: the ranks do not run the same program. Run the same "
                    "code, with the same settings, on all of them"
                )
            self._known[key] = description

    def _tag_of_one(self, number: int) -> int:
        return make_tag(Kind.OBJECT, self._microbatch.index, number)


def _tag_of_all(key: Hashable) -> int:
    return make_tag(Kind.DESCRIPTION, 0, 0) | stable_hash(key, 26)

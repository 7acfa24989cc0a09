"""Which errors may mean that a replica is lost: communication errors, including a peer's."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed import DistError

from opensmd.modelparallel.exceptions import PeerFailed

__all__ = ["may_be_a_loss"]

# torch's Gloo raises plain RuntimeErrors.
_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")


def may_be_a_loss(error: BaseException) -> bool:
    """Whether the end of another rank, perhaps of the same replica, may have caused an error."""
    return any(_is_of_communication(cause) for cause in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__  # not the context: an error while handling a loss is not a loss


def _is_of_communication(error: BaseException) -> bool:
    if isinstance(error, (DistError, PeerFailed)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)

"""What ``isend`` and ``irecv`` return: objects with ``is_completed()`` and ``wait()``."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["Request"]


class Request(ABC):
    """An operation that has been started."""

    @abstractmethod
    def is_completed(self) -> bool:
        """True if the operation has finished; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the operation has finished; afterwards :meth:`is_completed` is True.

        Raises:
            RuntimeError: the operation failed; the text says which, on which rank and why.
        """

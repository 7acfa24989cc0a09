"""What an error says, in a line: torch appends stacks to its texts, which hide what is said around them."""

from __future__ import annotations

__all__ = ["first_line"]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class if it has none."""
    return str(error).strip().partition("\n")[0].rstrip() or type(error).__name__

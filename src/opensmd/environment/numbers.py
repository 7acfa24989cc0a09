"""Integers in the environment: the first of several variables that is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["number"]


def number(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    """Return the integer in the first of ``names`` that is set; None if none is.

    Raises:
        ValueError: it is not an integer.
    """
    for name in names:
        value = environ.get(name, "")
        if not value:
            continue
        try:
            return int(value)
        except ValueError:
            raise ValueError(
                f"the environment variable {name} is {value!r}; a whole number was expected. "
                "Unset it or correct it before the script starts."
            ) from None
    return None

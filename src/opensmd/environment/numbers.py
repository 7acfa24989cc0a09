"""Whole numbers in the environment: the first of several variables that holds one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["number"]


def number(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    """The number in the first of ``names`` that is set; None if none is.

    Raises:
        ValueError: it holds something else.
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

"""For griffe, which reads the docstrings: Sphinx's roles, as in ``:func:`init```, become plain code."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:py:)?(?:func|class|meth|mod|exc|attr|data|obj):`~?([^`]+)`")


class PlainRoles(griffe.Extension):
    """Rewrites every docstring once it has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)

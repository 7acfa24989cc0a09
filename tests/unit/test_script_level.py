"""Warnings name the script's line, whatever lies between."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

import opensmd

INSIDE = """
import contextlib, warnings
from opensmd.script_level import script_level

@contextlib.contextmanager
def entered():
    warnings.warn("entered", stacklevel=script_level())
    yield

def warn():
    with entered():
        warnings.warn("called", stacklevel=script_level())
"""


def test_lines_of_this_package_of_torch_and_of_contextlib_are_passed_over() -> None:
    library: dict[str, Any] = {}
    exec(compile(INSIDE, str(Path(opensmd.__file__).with_name("library.py")), "exec"), library)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.no_grad()(library["warn"])()
    assert [str(warning.message) for warning in caught] == ["entered", "called"]
    assert {warning.filename for warning in caught} == {__file__}

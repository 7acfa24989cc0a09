"""Model parallelism in the process of the tests itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

import smdistributed.modelparallel.torch as smp


@pytest.fixture
def initialised() -> Iterator[None]:
    """Model parallelism with a single partition."""
    with mock.patch.dict(os.environ):  # smp.init tells this process that it is a group of one
        smp.init({"partitions": 1})
        yield
        smp.shutdown()

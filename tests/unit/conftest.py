"""Model parallelism in the process of the tests itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture
def initialised() -> Iterator[None]:
    """Model parallelism with a single partition."""
    # Importing it, too, tells this process that it is a group of one. That may not happen where this file is
    # imported: pytest's workers would inherit it.
    with mock.patch.dict(os.environ):
        import smdistributed.modelparallel.torch as smp

        smp.init({"partitions": 1})
        yield
        smp.shutdown()

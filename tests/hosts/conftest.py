"""Two hosts for tests, where this user may make such."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from benchmarks.hosts.networks import two_networks


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces with a cable between them."""
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(two_networks())
        except PermissionError as error:
            pytest.skip(str(error))

"""Fixtures shared by every test: the pools of ranks, one a world size, for the whole session."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.forks import preload_also
from tests.support.ports import take_block
from tests.support.ranks import RankPool

# What most of its models need. Not for the zoo, where importing it needs preparation.
preload_also("transformers.models.gpt2.modeling_gpt2", "transformers.models.bert.modeling_bert")

FAULTS = Path(__file__).parent / "faults"

# Tests start hundreds of interpreters; what one of them has compiled, the others need not compile again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# torch asks for the name of every address that it connects to. A resolver that loses the question asks again
# after five seconds, unless told otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
take_block()
_ENVIRONMENT = dict(os.environ)
with contextlib.suppress(ModuleNotFoundError):  # where only the newest torch is tried
    import hypothesis

    # An example takes as long as the machine has other work.
    hypothesis.settings.register_profile(
        "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("busy")
# Nothing that collecting tests makes is garbage: looking for it takes a quarter of the time.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put a file of faults, which mostly wait, behind every third of the others, which compute.

    Workers take files in this order: while one waits, the others have something to do.
    """
    files = [list(of_file) for _, of_file in itertools.groupby(items, key=lambda item: item.path)]
    waiting = [file for file in files if file[0].path.parent == FAULTS]
    computing = [file for file in files if file[0].path.parent != FAULTS]
    for place, file in enumerate(waiting, start=1):
        computing.insert(4 * place - 1, file)
    items[:] = itertools.chain.from_iterable(computing)


def pytest_collection_finish() -> None:
    """Undo what test modules did to the environment when they were imported.

    Importing the libraries tells this process that it is a group of one; the jobs that tests start would
    otherwise inherit that. What the modules are made of lives to the end of the session, so that collecting
    garbage need not go through it.
    """
    gc.freeze()
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage again, also in the process that hands tests to workers and collects none itself."""
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """With ``-n auto`` a worker more than there are cores: a third of the time, tests wait for their ranks.

    Each worker has pools of ranks of its own, a dozen processes or 3 GiB; hence not as many as one likes.
    """
    return min(len(os.sched_getaffinity(0)) + 1, 8)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], RankPool]]:
    """``pool(n)`` is the session's pool of ``n`` ranks; its processes start at first use."""
    pools: dict[int, RankPool] = {}

    def of_size(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield of_size
    for one in pools.values():
        one.close(kill=True)  # asking them takes seconds

"""Ranks that die, stop, never come or call something else: every other rank is told so, in time.

Every case has a group of its own, because an error ends a group; so one start of processes serves many cases.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from opensmd.native.build import load
from tests.support.patience import PATIENCE
from tests.support.ranks import Outcome, Ranks, run_once, started
from tests.support.timeouts import await_entry, meet_in_store

GROUP_TIMEOUT = 3.0
SHORT = 1.0  # of one wait, of which it is known for whom it is
LONG = 10 * PATIENCE  # a wait that takes as long as this fails its test
VICTIM = 1
store: dist.TCPStore
OPERATIONS = [
    "all_reduce",
    "large all_reduce",
    "async all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "recv",
    "large send",
    "polled recv",
    "polled send",
    "barrier",
]


def call(operation: str, group: Any) -> None:
    size = dist.get_world_size()
    if operation == "all_reduce":
        dist.all_reduce(torch.ones(10), group=group)
    elif operation == "large all_reduce":
        dist.all_reduce(torch.ones(3_000_000), group=group)
    elif operation == "async all_reduce":
        dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()
    elif operation == "all_gather":
        dist.all_gather_single(torch.empty(size * 10), torch.ones(10), group=group)
    elif operation == "reduce_scatter":
        dist.reduce_scatter_single(torch.empty(10), torch.ones(size * 10), group=group)
    elif operation == "broadcast":
        dist.broadcast(torch.ones(10), VICTIM, group=group)
    elif operation == "all_to_all":
        dist.all_to_all_single(torch.empty(size), torch.ones(size), group=group)
    elif operation == "recv":
        dist.recv(torch.empty(3), VICTIM, group=group)
    elif operation == "large send":
        dist.send(torch.ones(8_000_000), VICTIM, group=group)
    elif operation == "polled recv":
        poll(dist.irecv(torch.empty(3), VICTIM, group=group))
    elif operation == "polled send":
        poll(dist.isend(torch.ones(8_000_000), VICTIM, group=group))
    else:
        assert operation == "barrier"
        dist.barrier(group=group)


def poll(work: Any) -> None:
    """Ask again and again whether it is done."""
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()


def new_groups(count: int, timeout: float = LONG) -> list[Any]:
    """Groups whose calls wait for ``timeout`` seconds from now on, when all ranks have come so far."""
    groups = [dist.new_group(timeout=timedelta(seconds=LONG)) for _ in range(count)]
    for group in groups:
        dist.all_reduce(torch.ones(1000), group=group)
    dist.barrier()
    meet_in_store("groups are made")
    for group in groups:
        group.set_timeout(timedelta(seconds=timeout))
    return groups


def told(operation: str, group: Any) -> str:
    """The error of an operation that must fail; the group must then repeat its cause at once."""
    with pytest.raises(dist.DistBackendError) as first:
        call(operation, group)
    if operation != "recv":
        group.set_timeout(timedelta(seconds=LONG))
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(1), group=group)
    return str(first.value)


def run_with_victim(inside: str, blow: int, timeout: float, operations: list[str]) -> dict[str, str]:
    """What survivors are told; the victim strikes itself, while it waits ``inside`` an operation if named."""
    groups = new_groups(len(operations) + 1, timeout)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    meet_in_store("all are known")
    if dist.get_rank() == VICTIM:
        me = os.getpid()
        if inside:
            # A child strikes while this rank waits for the others, who come when it has.
            if os.fork() == 0:
                time.sleep(0.5)
                os.kill(me, blow)
                os._exit(0)
            call(inside, groups[-1])
        os.kill(me, blow)
        time.sleep(PATIENCE)
    if inside or blow == signal.SIGSTOP:
        while runs(pids[VICTIM]):
            time.sleep(0.05)
    if inside:
        if inside == "all_reduce":
            # The victim had given all that the others need of it: this one they may complete, the next never.
            with contextlib.suppress(dist.DistBackendError):
                call(inside, groups[-1])
        return {inside: told(inside, groups[-1])}
    return {
        operation: told(operation, group) for operation, group in zip(operations, groups[:-1], strict=True)
    }


def runs(pid: int) -> bool:
    """Whether a process is neither dead nor stopped."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def survivors(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for index, outcome in enumerate(outcomes) if index % 3 != VICTIM]


@pytest.mark.newest
def test_the_death_of_a_rank_is_told_to_all_others_whatever_they_call() -> None:
    outcomes = run_once(3, run_with_victim, "", signal.SIGKILL, LONG, OPERATIONS)
    assert outcomes[VICTIM].kind == "died"
    for outcome in survivors(outcomes):
        assert outcome.kind == "value", outcome.text
        assert outcome.value.keys() == set(OPERATIONS)
        for operation, text in outcome.value.items():
            assert f"rank {VICTIM}" in text, (operation, text)


@pytest.mark.parametrize("operation", ["all_reduce", "large all_reduce"])
def test_the_death_of_a_rank_inside_an_operation_is_told_to_all_others(operation: str) -> None:
    outcomes = run_once(3, run_with_victim, operation, signal.SIGKILL, LONG, [])
    assert outcomes[VICTIM].kind == "died"
    for outcome in survivors(outcomes):
        assert outcome.kind == "value", outcome.text
        assert f"rank {VICTIM}" in outcome.value[operation]


def test_a_stopped_rank_is_named_when_the_timeout_is_over() -> None:
    before, inside = ((name, signal.SIGSTOP, GROUP_TIMEOUT, ["all_reduce"]) for name in ("", "all_reduce"))
    with (
        started(3, run_with_victim, *before) as one,
        started(3, run_with_victim, *inside) as other,
    ):
        outcomes = [*one.answers(silent=[VICTIM]), *other.answers(silent=[VICTIM])]
    for outcome in survivors(outcomes):
        assert outcome.kind == "value", outcome.text
        assert f"rank {VICTIM}" in outcome.value["all_reduce"]
        assert "stopped" in outcome.value["all_reduce"]


def run_absent() -> list[str]:
    """What is told of barriers and reductions, in each of which one of the sound ranks loses patience."""
    groups, rank, texts = new_groups(4), dist.get_rank(), []
    if rank == VICTIM:
        time.sleep(PATIENCE)
    for number, group in enumerate(groups):
        impatient = 2 * (number % 2)
        timeout = timedelta(seconds=SHORT if rank == impatient else LONG)
        if rank == impatient:
            await_entry(group, [2 - rank])
        with pytest.raises(dist.DistBackendError) as error:
            if number < 2:
                dist.monitored_barrier(group, timeout=timeout)
            else:
                group.set_timeout(timeout)
                dist.all_reduce(torch.ones(7), group=group)
        texts.append(str(error.value))
    return texts


def test_a_rank_that_never_comes_is_named_once_in_the_words_of_torchs_own_backends() -> None:
    outcomes = run_once(3, run_absent, silent=[VICTIM])
    for rank, words in (
        (0, f"Rank {VICTIM} failed to pass monitoredBarrier in "),
        (2, "Rank 2 successfully reached monitoredBarrier, but received errors"),
    ):
        assert outcomes[rank].kind == "value", outcomes[rank].text
        *barriers, one, other = outcomes[rank].value
        for text in barriers:
            assert text.startswith(words) and "barrier" in text, text
        for text in (one, other):
            assert "all_reduce" in text, text
        for text in outcomes[rank].value:
            assert f"not arrived: rank {VICTIM} (" in text and text.count(" Timed out ") == 1, text


KINDS = ["operation", "shape", "large shape", "dtype", "reduction", "root", "split sizes"]


def differ_in(what: str, group: Any) -> None:
    victim = dist.get_rank() == VICTIM
    if what == "operation":
        dist.broadcast(torch.ones(4), 0, group=group) if victim else dist.all_reduce(
            torch.ones(4), group=group
        )
    elif what == "shape":
        dist.all_reduce(torch.ones(5 if victim else 4), group=group)
    elif what == "large shape":
        dist.all_reduce(torch.ones(500_000 if victim else 400_000), group=group)
    elif what == "dtype":
        dist.all_reduce(torch.ones(4, dtype=torch.int32 if victim else torch.float32), group=group)
    elif what == "reduction":
        dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if victim else dist.ReduceOp.SUM, group=group)
    elif what == "root":
        dist.broadcast(torch.ones(4), 2 if victim else 0, group=group)
    else:
        assert what == "split sizes"
        size = dist.get_world_size()
        rows = [2] * size if victim else [1] * size
        dist.all_to_all_single(torch.empty(sum(rows)), torch.ones(sum(rows)), rows, rows, group=group)


def run_mismatches() -> dict[str, str]:
    found = {}
    for what, group in zip(KINDS, new_groups(len(KINDS)), strict=True):
        with pytest.raises(dist.DistBackendError) as mismatch:
            differ_in(what, group)
        found[what] = str(mismatch.value)
    return found


@pytest.mark.newest
def test_calls_that_do_not_match_are_shown_to_every_rank() -> None:
    outcomes = run_once(3, run_mismatches)
    for outcome in outcomes:
        assert outcome.kind == "value", outcome.text
        for what, text in outcome.value.items():
            assert f"rank {VICTIM}" in text and "rank 0" in text, (what, text)


def run_death_before_the_first_call() -> str:
    """A rank dies as soon as all have agreed on how they are served."""
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    core: Any = load()
    if int(os.environ["RANK"]) == VICTIM:
        core.make_shared_backend = lambda **_: os._exit(3)
    dist.init_process_group("smddp", timeout=timedelta(seconds=LONG))
    with pytest.raises(dist.DistBackendError) as told:
        dist.barrier()
    return str(told.value)


def test_the_death_of_a_rank_before_its_first_call_is_told_to_the_others() -> None:
    outcomes = run_once(2, run_death_before_the_first_call, backend=None)
    assert f"rank {VICTIM} has died" in outcomes[0].value, outcomes[0].text


def run_new_group_without_one() -> str:
    """A rank leaves the default group, and the others make another one with it."""
    meet_in_store("all are here")
    if dist.get_rank() == VICTIM:
        dist.destroy_process_group()
        return ""
    with pytest.raises(dist.DistBackendError) as told:
        dist.new_group([0, VICTIM], timeout=timedelta(seconds=LONG))
    return str(told.value)


def test_a_rank_that_has_left_the_default_group_is_not_waited_for_in_new_ones() -> None:
    outcomes = run_once(2, run_new_group_without_one)
    assert f"rank {VICTIM} will not join (has left the default group)" in outcomes[0].value, outcomes


def run_late_start() -> str:
    """A rank that does not come to the making of a group."""
    global store  # kept after the end, for a rank that is still to be told
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0, timedelta(seconds=PATIENCE)
    )
    if rank == VICTIM:
        time.sleep(PATIENCE)
    with pytest.raises(RuntimeError) as told:
        dist.init_process_group(
            "smddp", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=2)
        )
    return str(told.value)


def test_a_rank_that_does_not_join_a_group_is_named() -> None:
    outcomes = run_once(3, run_late_start, backend=None, silent=[VICTIM])
    for outcome in survivors(outcomes):
        assert outcome.kind == "value", outcome.text
        # whoever is late itself is named beside it
        assert re.search(rf"\branks? [\d, ]*\b{VICTIM}\b[^:]* did not join", outcome.value), outcome.value


def arenas() -> set[Path]:
    return set(Path("/dev/shm").glob("*opensmd*"))


def test_a_crash_of_all_ranks_leaves_no_file_and_no_process() -> None:
    before = arenas()
    pids: list[int] = []

    def kill_all(ranks: Ranks) -> None:
        time.sleep(0.2)
        pids.extend(ranks.pids)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGKILL)

    run_once(3, run_until_killed, meanwhile=kill_all)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    # the files of other groups on this machine come and go
    deadline = time.monotonic() + PATIENCE
    while (left := arenas() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == set()


def run_until_killed() -> Any:
    while True:
        dist.all_reduce(torch.ones(100_000))

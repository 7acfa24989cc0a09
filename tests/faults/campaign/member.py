"""A rank's side of a case: sound calls whose results are checked, the fault, and what comes after it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.campaign.cases import Case
from tests.faults.campaign.operations import Call, perform
from tests.faults.campaign.records import Board, Failure, Record
from tests.faults.campaign.victim import LeavesTheStream, misbehave

__all__ = ["LONGEST_SILENCE", "run_rank"]

AFTERWARDS = 3  # sound calls after a fault that harms nobody
SOUND_CALLS_UNDER_BLOWS = 40  # of cases in which a process is stopped and goes on
LONGEST_SILENCE = 200.0  # timeout of groups in which nothing must expire, in seconds
LAST_SUCCESS = 30.0  # seconds after a fault, in which calls that do not need the victim may begin


def run_rank(case: Case, rank: int, backend: str, store: str, board: Board) -> Record:
    """Run the case on this rank; ``store`` is the address and port where ranks meet.

    Raises:
        Exception: the victim's own, if that is the fault.
    """
    record = Record()
    try:
        group, others = _groups(case, rank, backend, store)
        board.say_ready(rank)
        while not board.ready(case.ranks):
            time.sleep(0.001)
        if rank in case.members:
            _stream(case, rank, group, board, record)
        if others is not None:
            record.wrong += _still_serves(others)
        # What scripts do at their end; torch may refuse it where the script has done it already.
        if dist.is_initialized():
            dist.destroy_process_group()
    except LeavesTheStream:
        pass
    except Exception as error:
        if getattr(error, "is_the_fault", False):
            raise
        record.trouble = traceback.format_exc()
    return record


def _groups(case: Case, rank: int, backend: str, store: str) -> tuple[Any, Any]:
    """The group in which something goes wrong, and one of all ranks but the victim, if there are several."""
    if backend == "smddp":
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
    dist.init_process_group(
        backend,
        init_method=f"tcp://{store}",
        rank=rank,
        world_size=case.ranks,
        timeout=timedelta(seconds=LONGEST_SILENCE),
    )
    timeout = timedelta(seconds=_patience(case, rank, backend))
    group = dist.new_group(list(case.members), timeout=timeout)
    cut = case.fault == "cut link"
    rest = [other for other in range(case.ranks) if other != case.victim and not cut]
    others = dist.new_group(rest) if len(rest) > 1 else None
    return group, others if rank != case.victim else None


def _patience(case: Case, rank: int, backend: str) -> float:
    """Timeout of the group on this rank, in seconds: short where it must lose patience with the victim.

    The victim waits for the others, however late they are. Of all other faults smddp tells at once.
    """
    loses_it = case.expires and (rank != case.victim or case.on_hosts)
    return case.timeout if loses_it or backend != "smddp" else LONGEST_SILENCE


def _numbers(case: Case) -> Iterator[int]:
    """The numbers of the calls; without end where every other member must get an error."""
    number = 0
    last = SOUND_CALLS_UNDER_BLOWS if case.moment == "anytime" else case.calls + AFTERWARDS
    while case.ends_the_group or number <= last:
        yield number
        number += 1


def _stream(case: Case, rank: int, group: Any, board: Board, record: Record) -> None:
    began, patience = 0.0, _patience(case, rank, dist.get_backend(group))

    def mark() -> None:
        nonlocal began
        began = time.monotonic()

    for number in _numbers(case):
        operation = case.operation_of(number)
        call = Call(
            group=group,
            members=case.members,
            me=case.members.index(rank),
            number=number,
            elements=case.elements,
            dtype=getattr(torch, case.dtype),
            root=case.root,
            asynchronous=case.asynchronous,
            timeout=patience,
            mark=mark,
        )
        try:
            if number == case.calls and case.moment != "anytime":
                record.wrong += _the_call(case, rank, call, board)
            else:
                record.wrong += perform(operation, call)
        except (RuntimeError, ValueError, TypeError) as error:
            if getattr(error, "is_the_fault", False):
                raise
            failure = Failure(type(error).__name__, str(error), operation, began, time.monotonic())
            if record.failure is None:
                record.failure = failure
                if case.is_refused_message:
                    continue  # the group goes on
                record.again = _again(call)
            return
        record.completed += 1
        if case.ends_the_group and board.struck and began > board.struck + LAST_SUCCESS:
            record.wrong.append(f"after the fault, {number - case.calls} calls succeeded")
            return


def _the_call(case: Case, rank: int, call: Call, board: Board) -> list[str]:
    """The call that the fault falls upon."""
    if rank == case.victim:
        return misbehave(case, call, board)
    if case.moment == "within":
        # The victim is struck while it waits for the others, who come when it has been.
        while not board.struck:
            time.sleep(0.001)
        time.sleep(0.02)
    return perform(case.operation, call)


def _again(call: Call) -> Failure | None:
    """What the failed group says to the next call, at once: a wait would be a long one."""
    if dist.get_backend(call.group) == "smddp":
        call.group.set_timeout(timedelta(seconds=LONGEST_SILENCE))
    began = time.monotonic()
    try:
        perform("all_reduce", replace(call, elements=1, asynchronous=False))
    except (RuntimeError, ValueError) as error:
        return Failure(type(error).__name__, str(error), "all_reduce", began, time.monotonic())
    return None


def _still_serves(others: Any) -> list[str]:
    """Other groups go on, whatever became of the one."""
    ones = torch.ones(3)
    dist.all_reduce(ones, group=others)
    size = dist.get_world_size(others)
    return (
        [] if ones.tolist() == [size] * 3 else [f"another group then summed to {ones.tolist()}, not {size}"]
    )

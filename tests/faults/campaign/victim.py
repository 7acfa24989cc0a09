"""What the victim of a case does in place of its call, or with it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.campaign.cases import Case
from tests.faults.campaign.operations import Call, perform, prepare
from tests.faults.campaign.records import Board
from tests.support.patience import PATIENCE

__all__ = ["LeavesTheStream", "UserError", "misbehave"]

OTHER_DTYPE = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.int32: torch.float32,
    torch.int64: torch.float64,
    torch.uint8: torch.float32,
}


class UserError(Exception):
    """A mistake in the user's own code."""

    is_the_fault = True


class LeavesTheStream(Exception):
    """The victim has no group any more, and goes home."""


def misbehave(case: Case, call: Call, board: Board) -> list[str]:
    """Do what the case says; return what was wrong with the results.

    Raises:
        UserError: that is the fault.
        LeavesTheStream: the victim makes no further calls.
        RuntimeError: what the backend tells the victim.
    """
    if case.moment == "within":
        return _within(case, call, board)
    if case.moment == "issued":
        prepare(case.operation, replace(call, asynchronous=True)).go()
    board.strike()
    return FAULTS[case.fault](case, call)


def _within(case: Case, call: Call, board: Board) -> list[str]:
    """Enter the call early, and misbehave in a thread while this one waits for the others."""

    def strike() -> None:
        time.sleep(case.delay)
        board.strike()
        BLOWS[case.fault](call)

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    try:
        return perform(case.operation, call)
    finally:
        thread.join()


def kill(call: Call) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(call: Call) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(call: Call) -> None:
    os._exit(3)


def abort(call: Call) -> None:
    call.group._get_backend(torch.device("cpu")).abort()


def blow(case: Case, call: Call) -> list[str]:
    BLOWS[case.fault](call)
    return perform(case.operation, call)


def fail(case: Case, call: Call) -> list[str]:
    raise UserError("the script's own mistake")


def absent(case: Case, call: Call) -> list[str]:
    time.sleep(PATIENCE)  # and is killed when the others have been told
    raise LeavesTheStream


def destroy(case: Case, call: Call) -> list[str]:
    dist.destroy_process_group(call.group)
    raise LeavesTheStream


def other_operation(case: Case, call: Call) -> list[str]:
    """One that is not the next either: who has no part in a message calls that meanwhile, and rightly."""
    called = (case.operation, case.operation_of(call.number + 1))
    return perform(next(one for one in ("broadcast", "reduce", "gather") if one not in called), call)


def other_size(case: Case, call: Call) -> list[str]:
    return perform(case.operation, replace(call, elements=call.elements + 1))


def other_dtype(case: Case, call: Call) -> list[str]:
    return perform(case.operation, replace(call, dtype=OTHER_DTYPE[call.dtype]))


def other_reduction(case: Case, call: Call) -> list[str]:
    return perform(case.operation, replace(call, reduction=dist.ReduceOp.MAX))


def other_root(case: Case, call: Call) -> list[str]:
    return perform(case.operation, replace(call, root=(call.root + 1) % call.size))


def late(case: Case, call: Call) -> list[str]:
    time.sleep(case.timeout / 3)
    return perform(case.operation, call)


def refused_arguments(case: Case, call: Call) -> list[str]:
    """Arguments that are refused before anybody else has heard of the call."""
    tensor = torch.ones(2, dtype=torch.complex64)
    try:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, call.group)
    except (ValueError, NotImplementedError, RuntimeError):
        return perform(case.operation, call)
    return ["all_reduce took the maximum of complex numbers"]


def signals(case: Case, call: Call) -> list[str]:
    """Signals with a handler come all the time."""
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        return perform(case.operation, call)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def forked_child(case: Case, call: Call) -> list[str]:
    """A child uses its parent's group, and then takes leave of it."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))
        os._exit(_use_in_child(call))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    answers = {
        0: [],
        1: ["a forked child's call succeeded"],
        2: ["a forked child was not told that it is one"],
    }
    return answers.get(code, [f"a forked child ended with {code}"]) + perform(case.operation, call)


def _use_in_child(call: Call) -> int:
    uses: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(1), group=call.group),
        dist.destroy_process_group,
    ]
    for use in uses:
        try:
            use()
        except RuntimeError as error:
            if "fork" not in str(error):
                return 2
        else:
            return 1
    return 0


BLOWS: dict[str, Callable[[Call], None]] = {"kill": kill, "stop": stop, "exit": leave, "abort": abort}
FAULTS: dict[str, Callable[[Case, Call], list[str]]] = {
    **dict.fromkeys(BLOWS, blow),
    "exception": fail,
    "absent": absent,
    "destroy": destroy,
    "other operation": other_operation,
    "other size": other_size,
    "other dtype": other_dtype,
    "other reduction": other_reduction,
    "other root": other_root,
    "late": late,
    "refused arguments": refused_arguments,
    "signals": signals,
    "forked child": forked_child,
}

"""The ranks' side of a case: sound calls whose results are checked, then the fault."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.campaign.cases import Case

__all__ = ["run_case"]


def run_case(case: Case, timeout: float) -> list[str]:
    """Run the case on this rank; return what was wrong with the results of sound calls.

    Raises:
        RuntimeError: what the backend tells of the fault.
    """
    group = dist.new_group(list(case.members), timeout=timedelta(seconds=timeout))
    wrong: list[str] = []
    if dist.get_rank() not in case.members:
        return wrong
    for number in range(case.calls):
        wrong += call(case.operation, case, group, number, case.elements, torch.float32)
    if dist.get_rank() == case.victim:
        return wrong + misbehave(case, group, timeout)
    return wrong + call(case.operation, case, group, case.calls, case.elements, torch.float32)


def misbehave(case: Case, group: Any, timeout: float) -> list[str]:
    """What the victim does in place of its last call."""
    operation, elements, dtype = case.operation, case.elements, torch.float32
    if case.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case.fault == "exit":
        os._exit(3)
    elif case.fault == "absent":
        time.sleep(timeout * 3)
        return []
    elif case.fault == "late":
        time.sleep(timeout / 3)
    elif case.fault == "other operation":
        operation = "broadcast" if operation != "broadcast" else "all_reduce"
    elif case.fault == "other size":
        elements += 1
    elif case.fault == "other dtype":
        dtype = torch.int32
    return call(operation, case, group, case.calls, elements, dtype)


def call(operation: str, case: Case, group: Any, number: int, elements: int, dtype: torch.dtype) -> list[str]:
    """One call; what is wrong with its result."""
    size, me = len(case.members), case.members.index(dist.get_rank())
    own = torch.full((elements,), me + number, dtype=dtype)
    out, expected = own, own
    if operation == "all_reduce":
        dist.all_reduce(own, group=group)
        expected = torch.full_like(own, sum(range(size)) + size * number)
    elif operation == "broadcast":
        dist.broadcast(own, case.members[0], group=group)
        expected = torch.full_like(own, number)
    elif operation == "barrier":
        dist.barrier(group=group)
    else:
        values = torch.arange(size, dtype=dtype).repeat_interleave(elements)
        if operation == "all_gather":
            out, expected = torch.empty(size * elements, dtype=dtype), values + number
            dist.all_gather_single(out, own, group=group)
        elif operation == "reduce_scatter":
            out, expected = torch.empty_like(own), torch.full_like(own, me * size)
            dist.reduce_scatter_single(out, values, group=group)
        else:
            assert operation == "all_to_all"
            out, expected = torch.empty_like(values), values + me
            dist.all_to_all_single(out, values + me, group=group)
    return [] if torch.equal(out, expected) else [f"wrong numbers from {operation} #{number}"]

"""A message on one rank and a collective on another: said at once where it is a mistake, and only there."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from opensmd.collectives._torch_internals import cpu_backend
from tests.support.ranks import run_once

WAIT = 1.5  # seconds; long enough for a warning


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]


def fails(call: Callable[[], Any]) -> None:
    try:
        call()
    except dist.DistBackendError:
        return
    raise AssertionError("no error at the group's end")


def run_circle(message: str) -> list[str]:
    """The warning ends the group, long before its timeout: whichever rank comes late is waited for."""
    group, texts = dist.new_group(), []

    def end(warning: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, RuntimeWarning):
            texts.append(str(warning))
            cpu_backend(group).abort()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = end
        if dist.get_rank() == 1:
            fails(lambda: dist.all_reduce(torch.ones(3), group=group))
        elif message == "recv":
            fails(lambda: dist.recv(torch.ones(3), 1, group=group))
        else:
            fails(lambda: dist.send(torch.ones(8_000_000), 1, group=group))
    return texts


def run_late_send() -> list[str]:
    """Rank 1's asynchronous call waits for rank 0, but its script goes on to what rank 0 waits for."""
    tensor = torch.ones(3)
    if dist.get_rank() == 0:
        texts = warned(lambda: dist.recv(tensor, 1))
        dist.all_reduce(tensor)
        return texts
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    time.sleep(WAIT)
    dist.send(torch.ones(3), 0)
    return warned(work.wait)


def run_two_threads(threaded: int) -> list[str]:
    """One rank calls from two threads; its second one comes late, and nothing was wrong."""
    mine, late = torch.ones(3), torch.ones(3)
    if dist.get_rank() == 0:
        message: Callable[[], Any] = lambda: dist.recv(late, 1)  # noqa: E731
    else:
        message = lambda: dist.send(late, 0)  # noqa: E731
    if dist.get_rank() != threaded:
        first, second = (message, lambda: dist.all_reduce(mine))
        return warned(lambda: [first(), second()] if threaded else [second(), first()])
    thread = threading.Thread(
        target=lambda: [time.sleep(WAIT), message() if threaded else dist.all_reduce(mine)]
    )
    thread.start()
    texts = warned((lambda: dist.all_reduce(mine)) if threaded else message)
    thread.join()
    return texts


def run_all() -> dict[str, list[str]]:
    return {
        "late send": run_late_send(),
        "threads of 0": run_two_threads(0),
        "threads of 1": run_two_threads(1),
        "recv": run_circle("recv"),
        "send": run_circle("send"),
    }


def test_a_message_against_a_collective_is_warned_of_before_the_timeout_and_nothing_legal_is() -> None:
    receiver, other = (outcome for outcome in run_once(2, run_all))
    assert receiver.kind == other.kind == "value", receiver.text + other.text
    for name in ("recv", "send"):
        (text,) = receiver.value.pop(name)
        assert (
            f"{name}({'from' if name == 'recv' else 'to'} rank 1" in text and "on rank 0 has waited" in text
        )
        assert (
            "rank 1 waits in all_reduce(sum, float32, count=3)" in text and "until rank 0 calls that" in text
        )
        assert other.value.pop(name) == []
    assert all(texts == [] for found in (receiver.value, other.value) for texts in found.values()), (
        receiver.value,
        other.value,
    )

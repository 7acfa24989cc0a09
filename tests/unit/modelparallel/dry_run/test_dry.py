"""Which threads are in a dry run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.dry_run.dry import dry, is_tracing


def in_another_thread() -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_tracing()))
    thread.start()
    thread.join()
    return found[0]


def test_while_a_dry_run_goes_backward_so_do_the_threads_of_devices() -> None:
    model = nn.Linear(2, 2)
    seen = []

    def backward(plain: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(in_another_thread())
        plain(*args, **kwargs)

    with dry(model, None, backward):
        assert is_tracing() and not in_another_thread()
        torch.autograd.backward(model(torch.ones(1, 2)).sum())
        assert seen == [True] and not in_another_thread()
    assert not is_tracing()

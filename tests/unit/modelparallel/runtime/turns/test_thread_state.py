"""The modes of one thread, found again in another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opensmd.modelparallel.runtime.turns.thread_state import ThreadState


def in_another_thread(work: Callable[[], Any]) -> Any:
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


class Doubling(TorchFunctionMode):
    """Says that every sum is twice as much."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of sums alone."""
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.Tensor.sum else result


class Tripling(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Says that every sum is three times as much, as a counter of operations sees them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of sums alone."""
        result = func(*args, **(kwargs or {}))
        return 3 * result if func is torch.ops.aten.sum.default else result


def observed() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.empty(1).device.type,
        torch.ones(3, device="cpu").sum().item(),
    )


@pytest.mark.parametrize(
    "modes",
    [
        (),
        (torch.no_grad,),
        (torch.inference_mode,),
        (torch.inference_mode, torch.enable_grad),
        (lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),),
        (lambda: torch.device("meta"),),
        (Doubling, torch.no_grad),
        (Doubling, Tripling),
    ],
)
def test_another_thread_finds_the_same_modes_and_loses_them_again(modes: tuple[Any, ...]) -> None:
    plain = in_another_thread(observed)
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        state, here = ThreadState.of_this_thread(), observed()

        def restored() -> tuple[Any, ...]:
            with state.restored():
                inside = observed()
            return inside, observed()

        assert (here == plain) is (not modes)
        assert in_another_thread(restored) == (here, plain)


def test_a_mode_that_the_calling_thread_has_not_is_switched_off_in_the_other() -> None:
    state = ThreadState.of_this_thread()
    with torch.no_grad():
        assert not torch.is_grad_enabled()
        with state.restored():
            assert torch.is_grad_enabled()

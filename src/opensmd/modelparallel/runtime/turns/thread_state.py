"""The modes of the thread that calls a step, for the threads that run its microbatches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opensmd.modelparallel._torch_internals import any_autocast
from opensmd.modelparallel.function_modes._torch_internals import dispatch_modes, function_modes, on_stack

__all__ = ["ThreadState", "without_autocast"]


class ThreadState(NamedTuple):
    """Gradient and inference mode, autocast, function and dispatch modes, CUDA's stream.

    A default device is a function mode, and a counter of operations a dispatch mode.

    The stream also determines the current device; new threads would start with the first.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    cache: bool
    modes: tuple[TorchFunctionMode | TorchDispatchMode, ...]
    stream: torch.cuda.Stream | None

    @classmethod
    def of_this_thread(cls) -> ThreadState:
        """Return the current modes."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            # Queried one by one only if any is on; most steps have none.
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            )
            if any_autocast()
            else (),
            cache=torch.is_autocast_cache_enabled(),
            modes=(*function_modes(), *dispatch_modes()),
            stream=_stream(),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Enter these modes in another thread."""
        with contextlib.ExitStack() as stack:
            # In this order, because leaving or entering inference mode also sets the gradient mode.
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=True, cache_enabled=self.cache))
            for mode in self.modes:
                stack.enter_context(on_stack(mode))
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            yield


def _stream() -> torch.cuda.Stream | None:
    """Return this thread's stream, on its device; None if CUDA is not in use."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Leave autocast, for what was requested outside any, in a thread that may now be in one."""
    return _autocast_off() if any_autocast() else contextlib.nullcontext()


@contextlib.contextmanager
def _autocast_off() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield

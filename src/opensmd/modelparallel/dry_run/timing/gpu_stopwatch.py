"""When a GPU gets to a place of the program, because the host does not wait for it.

Waiting at every module would charge each with the time in which the GPU has nothing to do: from the module's
call until its first kernel starts. In a step, kernels are queued meanwhile.
"""

from __future__ import annotations

import torch

__all__ = ["GpuStopwatch"]


class GpuStopwatch:
    """Marks places in the current stream of a GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        """Return the moment at which the GPU will have done what has been queued so far."""
        moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        moment.record(torch.cuda.current_stream(self._device))
        return moment

    def seconds(self, since: torch.cuda.Event, until: torch.cuda.Event) -> float:
        """Return the seconds from one moment to another; wait until the GPU has got there."""
        until.synchronize()
        milliseconds: float = since.elapsed_time(until)
        return milliseconds / 1e3

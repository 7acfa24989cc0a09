"""The private parts of torch's GradScaler that sharing infinities over stages needs, in one place.

``GradScaler.step(optimizer)`` asks first whether the optimizer scales by itself, also on ranks that then skip
the step. Nothing else of it reaches the optimizer there, so the optimizer looks who asks.
A dry run under fake tensors must leave no fake scale behind.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.amp import GradScaler

__all__ = ["UnscalingScaler", "foreign_scaler_asks", "scales_made_for_real"]


def foreign_scaler_asks() -> bool:
    """Whether the caller's caller is torch's own GradScaler, which knows of this rank's infinities only."""
    asking = sys._getframe(2).f_locals.get("self")
    return isinstance(asking, torch.amp.GradScaler) and not isinstance(asking, UnscalingScaler)


class UnscalingScaler(torch.amp.GradScaler):
    """torch's GradScaler with a say in what the check for infinities finds."""

    def start_scale(self, device: torch.device) -> None:
        """Make the scale now rather than at the first loss, so that it does not depend on where that is."""
        if self._enabled:
            self._lazy_init_scale_growth_tracker(device)

    def scale_state(self) -> torch.Tensor:
        """The scale, and how many steps it has gone without an infinity, as one vector."""
        assert self._scale is not None and self._growth_tracker is not None
        return torch.stack([self._scale.double(), self._growth_tracker.double()])

    def set_scale_state(self, values: torch.Tensor) -> None:
        """Take over another scaler's :meth:`scale_state`."""
        assert self._scale is not None and self._growth_tracker is not None
        self._scale.copy_(values[0])
        self._growth_tracker.copy_(values[1])

    def share_infinities(self, found: dict[torch.device, torch.Tensor]) -> None:
        """Replace what was found on this rank by what was found anywhere; to be overridden."""
        raise NotImplementedError

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
            optimizer, inv_scale, found_inf, allow_fp16
        )
        if not found:
            found[found_inf.device] = found_inf
        self.share_infinities(found)
        return found


@contextlib.contextmanager
def scales_made_for_real() -> Iterator[None]:
    """torch's scaler makes its scale at its first use: a real one, where a fake one would stay for good."""
    plain = GradScaler._lazy_init_scale_growth_tracker

    def for_real(self: GradScaler, device: torch.device) -> None:
        with unset_fake_temporarily():
            plain(self, device)

    GradScaler._lazy_init_scale_growth_tracker = for_real  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GradScaler._lazy_init_scale_growth_tracker = plain  # type: ignore[method-assign]

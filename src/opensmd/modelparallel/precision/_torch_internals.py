"""The private parts of torch's GradScaler that sharing infinities over stages needs, in one place.

``GradScaler.step(optimizer)`` first asks whether the optimizer scales by itself, even on ranks that then skip
the step. Nothing else reaches the optimizer there, so the optimizer checks who is asking. A dry run under
fake tensors must leave no fake scale behind.
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
    """Whether the caller's caller is torch's own GradScaler, which knows only this rank's infinities."""
    asking = sys._getframe(2).f_locals.get("self")
    return isinstance(asking, torch.amp.GradScaler) and not isinstance(asking, UnscalingScaler)


class UnscalingScaler(torch.amp.GradScaler):
    """torch's GradScaler with a hook into the check for infinities."""

    def start_scale(self, device: torch.device) -> None:
        """Create the scale now rather than at the first loss, so that it does not depend on where that is."""
        if self._enabled:
            self._lazy_init_scale_growth_tracker(device)

    def scale_state(self) -> torch.Tensor:
        """Return the scale, and the number of steps without an infinity, as one vector."""
        assert self._scale is not None and self._growth_tracker is not None
        return torch.stack([self._scale.double(), self._growth_tracker.double()])

    def set_scale_state(self, values: torch.Tensor) -> None:
        """Adopt another scaler's :meth:`scale_state`."""
        assert self._scale is not None and self._growth_tracker is not None
        self._scale.copy_(values[0])
        self._growth_tracker.copy_(values[1])

    def share_infinities(self, infinities: dict[torch.device, torch.Tensor]) -> None:
        """Replace this rank's finding by that of all ranks; for overriding."""
        raise NotImplementedError

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        infinities: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
            optimizer, inv_scale, found_inf, allow_fp16
        )
        if not infinities:
            infinities[found_inf.device] = found_inf
        self.share_infinities(infinities)
        return infinities


@contextlib.contextmanager
def scales_made_for_real() -> Iterator[None]:
    """Make torch's scaler, which creates its scale on first use, create a real one: a fake would stay."""
    plain = GradScaler._lazy_init_scale_growth_tracker

    def for_real(self: GradScaler, device: torch.device) -> None:
        with unset_fake_temporarily():
            plain(self, device)

    GradScaler._lazy_init_scale_growth_tracker = for_real  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GradScaler._lazy_init_scale_growth_tracker = plain  # type: ignore[method-assign]

"""``smp.amp.GradScaler``: torch's, with infinities shared over all partitions.

Each rank sees only its own gradients. If a gradient overflows on any of them, all ranks skip the step and
lower the scale, so that the partitions stay at the same step with the same scale. Ranks without parameters
need not take part, because scripts guard ``scaler.step(optimizer)`` with
``len(list(model.local_parameters())) > 0``.
"""

from __future__ import annotations

import itertools
from typing import Any, overload

import torch

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.precision._torch_internals import UnscalingScaler
from opensmd.modelparallel.precision.loss_scale import require_one_scale
from opensmd.modelparallel.precision.owners import from_owners, share_among_owners
from opensmd.modelparallel.state import state

__all__ = ["GradScaler"]

Device = str | torch.device

_numbers = itertools.count()


class GradScaler(UnscalingScaler):
    """Drop-in for torch's GradScaler.

    Call ``scale(loss)`` inside the step function, and ``step(optimizer)`` and ``update()`` outside, on all
    ranks.

    Args:
        device: "cuda" or "cpu"; by default "cuda" if available. It may come first, as in torch now, or be a
            keyword.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch, in this order.

    Raises:
        SMPError: with ``shard_optimizer_state`` or ``sharded_data_parallel_degree``, or with ``fp16`` or
            ``bf16``, which have their own loss scale or need none.
        TypeError: a device given both first and as a keyword, or a setting that torch's does not have.
    """

    @overload
    def __init__(
        self,
        init_scale: float = ...,
        growth_factor: float = ...,
        backoff_factor: float = ...,
        growth_interval: int = ...,
        enabled: bool = ...,
        *,
        device: Device | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        device: Device,
        init_scale: float = ...,
        growth_factor: float = ...,
        backoff_factor: float = ...,
        growth_interval: int = ...,
        enabled: bool = ...,
    ) -> None: ...

    def __init__(self, *settings: Any, device: Device | None = None, **named: Any) -> None:
        if settings and isinstance(settings[0], Device):
            if device is not None:
                raise TypeError(f"smp.amp.GradScaler: two devices, {settings[0]!r} and device={device!r}")
            device, settings = settings[0], settings[1:]
        cfg = state.cfg if state.initialized else None
        if named.get("enabled", True):
            require_one_scale()
        if cfg and (cfg.shard_optimizer_state or cfg.shards_parameters) and named.get("enabled", True):
            key = "sharded_data_parallel_degree" if cfg.shards_parameters else "shard_optimizer_state"
            raise SMPError(
                "smp.amp.GradScaler looks for infinities in the gradients of the optimizer's parameters, of "
                f"which each replica trains other slices with {key}. Use the setting fp16, which has a loss "
                f"scale of its own, or autocast to bfloat16, which needs none, or leave out {key}"
            )
        resolved = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        super().__init__(resolved.type, *settings, **named)
        self.start_scale(resolved)
        state.scalers[next(_numbers)] = self

    def share_infinities(self, infinities: dict[torch.device, torch.Tensor]) -> None:
        """Set every entry to the maximum over this rank's devices and all ranks with parameters.

        Raises:
            SMPError: the scaler was created before ``smp.init``, and that was asked for 16 bits.
        """
        require_one_scale()
        first = next(iter(infinities.values()))
        worst = torch.stack([item.to(first.device) for item in infinities.values()]).max()
        share_among_owners(worst, name="smp.amp.GradScaler")
        for item in infinities.values():
            item.copy_(worst)

    def follow_owners(self) -> None:
        """Adopt the scale of the ranks with parameters; called on all ranks when a step starts.

        A rank without parameters takes no part in :meth:`step`, and scripts may skip :meth:`step` and
        :meth:`update` there, but it may be the one that scales the loss.
        """
        if self.is_enabled():
            self.set_scale_state(from_owners(self.scale_state()))

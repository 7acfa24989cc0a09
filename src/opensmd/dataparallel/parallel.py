"""``DistributedDataParallel`` with the original's v1 signature: torch's own, plus late moves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from opensmd.collectives.gradients.buckets import require_bucket_size
from opensmd.dataparallel import _torch_internals
from opensmd.dataparallel.deprecation import warn_deprecated
from opensmd.dataparallel.world import check_group, require_initialized

__all__ = ["DistributedDataParallel"]

_PATH = "smdistributed.dataparallel.torch.parallel.DistributedDataParallel"


class DistributedDataParallel(TorchDDP):
    """Averages gradients over all ranks during backward; ``.module`` is the wrapped module.

    It is a ``torch.nn.parallel.DistributedDataParallel``: ``no_sync()``, ``join()`` and
    ``register_comm_hook()`` are torch's. Unlike torch's, the model may be wrapped first and moved afterwards
    (``model.cuda(local_rank)``, ``model.to(...)``, ``model.double()``), as in the original's examples.

    Args:
        module: the module to train; its parameters must be the same, in the same order, on all ranks.
        device_ids: the module's one CUDA device; None for a module on the CPU or on several devices.
        output_device: where the output goes for a module on one CUDA device.
        broadcast_buffers: copy rank 0's buffers to all ranks at the start of each forward in training mode.
            The original's page asks for False because it did not support this; here both work. Unlike
            torch's, never in eval mode: the original's examples evaluate only on rank 0.
        process_group: None or ``group.WORLD``.
        bucket_cap_mb: size of a gradient bucket in MiB; None is 25.

    Raises:
        SMDDPNotInitializedError: ``init_process_group()`` has not been called.
        SMDDPGroupError: another process group was given.
        TypeError: a parameter that this interface never had, or dropped; or not a module.
        ValueError: a bucket size that is not a positive number, or devices on a machine without any.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        broadcast_buffers: bool = True,
        process_group: object = None,
        bucket_cap_mb: int | None = None,
        **others: Any,
    ) -> None:
        _refuse(others)
        warn_deprecated(_PATH, "torch.nn.parallel.DistributedDataParallel")
        require_initialized("DistributedDataParallel")
        _check(module, output_device, bucket_cap_mb)
        if process_group is not None:
            check_group(process_group, "process_group")
        with warnings.catch_warnings():
            # torch is replacing this parameter by one that still copies the buffers once at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                module,
                device_ids=device_ids or None,
                output_device=output_device,
                bucket_cap_mb=bucket_cap_mb,
                broadcast_buffers=None if broadcast_buffers else False,  # None is torch's default, True
            )
        self._reduced_as = self._kind()
        self._moved = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with the reducer hooked to the parameters where they are now."""
        self._follow_moves()
        due = self.require_forward_param_sync
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            # torch skips the next copy of the buffers after a forward without gradients, which ranks that did
            # not evaluate would not know about.
            if not self.training and not torch.is_grad_enabled():
                self.require_forward_param_sync = due

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """See ``torch.nn.parallel.DistributedDataParallel.register_comm_hook``."""
        self._follow_moves()
        super().register_comm_hook(state, hook)

    def will_sync_module_buffers(self) -> bool:
        """Return True if this forward copies buffers from rank 0, in which every rank must take part."""
        wanted: bool = super().will_sync_module_buffers()  # type: ignore[no-untyped-call]
        return self.training and wanted

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DistributedDataParallel:
        """Convert the module; ``cuda()``, ``to()``, ``double()`` and the like call this."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._moved = True
        return self

    def _follow_moves(self) -> None:
        # The wrapped module may also have been moved directly, which only its parameters show.
        if self._moved or self._kind() != self._reduced_as:
            _torch_internals.rebuild_reducer(self)
            self._reduced_as = self._kind()
            self._moved = False

    def _kind(self) -> tuple[torch.device, torch.dtype] | None:
        first = next(self.module.parameters(), None)
        return None if first is None else (first.device, first.dtype)


def _refuse(others: dict[str, Any]) -> None:
    if others:
        raise TypeError(
            f"DistributedDataParallel of the v1 interface takes no {', '.join(sorted(others))}. To add up "
            "gradients over several backward passes use model.no_sync(); for find_unused_parameters and its "
            "kind use torch.nn.parallel.DistributedDataParallel with the smddp backend"
        )


def _check(module: object, output_device: object, bucket_cap_mb: object) -> None:
    """Check what torch's own wrapper accepts silently, or refuses without a reason."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"DistributedDataParallel: expected a torch.nn.Module, got {module!r:.80}")
    if output_device is not None and not torch.cuda.is_available():
        raise ValueError(
            f"DistributedDataParallel: output_device={output_device!r} must be None for a module on the CPU, "
            "whose output is where it computes it"
        )
    require_bucket_size(bucket_cap_mb, "DistributedDataParallel", or_none=True)

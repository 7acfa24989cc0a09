"""What the setting ``sharded_data_parallel_degree`` adds to ``smp.DistributedOptimizer``.

``step()`` first clips the gradients to ``sdp_gradient_clipping``. Scripts read flat FP32 shards and norms
under the names from DeepSpeed's optimizer, the original's engine.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensmd.modelparallel.sharding.sharded_optimizer import ShardedMethods
from opensmd.modelparallel.state import state

__all__ = ["ShardedParameterMethods"]


class ShardedParameterMethods(ShardedMethods):
    """A mixin that precedes a distributed optimizer's own class.

    Attributes:
        _global_grad_norm: the norm of the mean gradient before clipping, since the last step.
    """

    _global_grad_norm = 0.0
    _smp_norm_is_new = False
    _smp_flat: dict[int, Tensor] | None = None  # contiguous masters, by the id of the first

    @property
    def ds_param_shard_group(self) -> dist.ProcessGroup:
        """The ranks that split parameters."""
        return self._smp_group

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's part of every parameter group in FP32, concatenated.

        With fp16 and bf16, it is the memory of the masters; otherwise a copy.
        """
        return [self._smp_flat_group(group) for group in self.param_groups]

    def _smp_flat_group(self, group: dict[str, Any]) -> Tensor:
        parts = group["params"]
        flat = (self._smp_flat or {}).get(id(parts[0])) if parts else None
        if flat is not None:
            return flat
        pieces = [part.detach().reshape(-1).float() for part in parts]
        return torch.cat(pieces) if pieces else torch.empty(0)

    def _smp_clip(self, max_norm: float, group: dist.ProcessGroup) -> Tensor:
        if state.cfg.half_dtype is None:  # with half precision, the masters have the gradients
            self._smp_collect_gradients()
        norm = super()._smp_clip(max_norm, group)
        if not self._smp_norm_is_new:
            self._global_grad_norm, self._smp_norm_is_new = float(norm), True
        return norm

    def _smp_before_training(self) -> None:
        super()._smp_before_training()
        limit, owners = state.cfg.sdp_gradient_clipping, state.groups.owners
        if owners is not None:
            self._smp_clip(limit or math.inf, owners)
        self._smp_norm_is_new = False

    def _smp_lay_out(self, group: dict[str, Any]) -> None:
        super()._smp_lay_out(group)
        masters = group["params"]
        if not masters or any(master.dtype is not torch.float32 for master in masters):
            return
        flat = torch.cat([master.detach().reshape(-1) for master in masters])
        first = 0
        for master in masters:
            master.data = flat[first : first + master.numel()].view(master.shape)
            first += master.numel()
        self._smp_flat = {**(self._smp_flat or {}), id(masters[0]): flat}

"""Moving a split model: to a device, to a dtype, or whole to every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from opensmd.modelparallel.communicate import meet_for
from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder, give_data
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.gather import collect
from opensmd.modelparallel.state_dicts.missing_tensors import stand_ins
from opensmd.modelparallel.state_dicts.state_dicts import StateDicts

if TYPE_CHECKING:
    from typing import Self  # typing has it from Python 3.11 on

__all__ = ["Moves"]


class Moves(StateDicts):
    """A module whose parts are moved on the ranks where they live.

    Args:
        module: the user's module.
    """

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move like torch; after partitioning, move only what lives here, and only to another device.

        Raises:
            SMPError: it would change the dtype or the kind of device of a partitioned model, which the other
                ranks rely on.
        """
        if not self.partitioned or self.gathered:
            return super().to(*args, **kwargs)
        tensors = [*self.local_parameters(), *self.local_buffers()]
        moved = [tensor.detach().to(*args, **kwargs) for tensor in tensors]
        for tensor, new in zip(tensors, moved, strict=True):
            same_dtype = new.dtype == tensor.dtype or not tensor.is_floating_point()
            if not same_dtype or new.device.type != tensor.device.type:
                raise SMPError(
                    f"model.to: the model is partitioned and cannot go from {tensor.dtype} on "
                    f"{tensor.device.type} to {new.dtype} on {new.device.type} any more; do it before the "
                    "first step"
                )
        for tensor, new in zip(tensors, moved, strict=True):
            if new.dtype == tensor.dtype and new.device != tensor.device:
                tensor.data = new
        return self

    def follow_inputs(self, inputs: Any) -> None:
        """Move a model on the CPU to the GPU of the first step's tensors; scripts move only these."""
        device = next((leaf.device for leaf in structure.tensors_in(inputs) if leaf.is_cuda), None)
        if device is not None:
            self._follow(device)

    def follow_cuda(self) -> None:
        """Move likewise before there are any tensors, if the script already uses CUDA."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._follow(torch.device("cuda", torch.cuda.current_device()))

    def _follow(self, device: torch.device) -> None:
        if all(parameter.device.type == "cpu" for parameter in self.parameters()):
            self.delayed.move(device)
            with self.delayed.planned():
                super().to(device)
            state.follow_device()

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move like torch; after partitioning, like ``to`` that device."""
        if not self.partitioned or self.gathered:
            return super().cuda(device)
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def float(self) -> Self:
        """Convert like torch; after partitioning, like ``to(torch.float32)``."""
        return self.to(torch.float32) if self.partitioned else super().float()

    def double(self) -> Self:
        """Convert like torch; after partitioning, like ``to(torch.float64)``."""
        return self.to(torch.float64) if self.partitioned else super().double()

    def half(self) -> Self:
        """Convert like torch; after partitioning, like ``to(torch.float16)``."""
        return self.to(torch.float16) if self.partitioned else super().half()

    def bfloat16(self) -> Self:
        """Convert like torch; after partitioning, like ``to(torch.bfloat16)``."""
        return self.to(torch.bfloat16) if self.partitioned else super().bfloat16()

    def cpu(self) -> Self:
        """Gather all parameters and buffers on every rank of the replica, on the CPU.

        The model is then whole on each rank, for example for use without model parallelism through
        :meth:`get_module`, but can no longer be trained in steps.

        Raises:
            SMPUnsupportedError: parameters are sharded, so module calls have to gather them.
        """
        if state.cfg.shards_parameters:
            raise SMPUnsupportedError(
                "model.cpu() cannot be combined with sharded_data_parallel_degree: load model.state_dict(), "
                "which is whole, into a model of its own"
            )
        if self.partitioned and not self.gathered:
            meet_for("model.cpu()")
            module = self.get_module()
            with stand_ins(module, self.is_here):
                tensors = dict([*module.named_parameters(), *module.named_buffers()])
            whole = collect(tensors, self.home_of, group=state.groups[CommGroup.PP_GROUP])
            self.gathered = True
            with torch.no_grad():
                for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                    data = whole[name].detach().cpu().clone()
                    if isinstance(tensor, Placeholder):
                        owner, _, last = name.rpartition(".")
                        module.get_submodule(owner)._buffers[last] = data
                    else:
                        give_data(tensor, data)
        return super().cpu()

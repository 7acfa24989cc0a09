"""Refusing to copy or pickle a split model, because a rank could only copy the part that it holds."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import nn

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.tensors.placeholder import RemoteTensor
from opensmd.modelparallel.state import state

__all__ = ["NotCopied"]


class NotCopied(nn.Module):
    """Mixin for a module whose parameters may be on other ranks."""

    @property
    @abstractmethod
    def partitioned(self) -> bool:
        """Whether the model has been partitioned."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse what ``copy.deepcopy``, ``pickle`` and ``torch.save`` call.

        Raises:
            SMPUnsupportedError: another rank has some of the parameters, or will have from the first step on.
        """
        if not self.partitioned and state.initialized and state.cfg.pipeline_parallel_degree > 1:
            raise SMPUnsupportedError(
                f"a {type(self).__name__} that its first step is going to split over pipeline ranks can be "
                "neither copied nor pickled (copy.deepcopy, torch.save(model), AveragedModel): the copy "
                "would not be split with it. Before the first step, copy model.get_module(); to average the "
                "weights, let each rank average those of model.local_named_parameters() after it"
            )
        if any(isinstance(parameter, RemoteTensor) for parameter in self.parameters()):
            raise SMPUnsupportedError(
                f"a {type(self).__name__} that is split over pipeline ranks can be neither copied nor "
                "pickled (copy.deepcopy, torch.save(model), AveragedModel): each rank has its own part "
                "alone. Save model.state_dict(), which all ranks call, or use smp.save_checkpoint; to "
                "average the weights, let each rank average those of model.local_named_parameters()"
            )
        return super().__reduce_ex__(protocol)

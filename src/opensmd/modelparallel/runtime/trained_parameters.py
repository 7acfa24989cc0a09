"""Which parameters are trained: the same on all ranks, and part of what identifies calls."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from opensmd.modelparallel._torch_internals import without_interception
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.tensors.tags import Tag

__all__ = ["TrainedParameters"]


class TrainedParameters:
    """``requires_grad`` of a placed model's parameters.

    Args:
        parameters: all parameters, with their tags.

    Attributes:
        epoch: changes when a parameter's ``requires_grad`` does; part of every call's key.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Tag]]) -> None:
        self.epoch = 0
        self._parameters = parameters
        self._numbers = {tag: number for number, (_, tag) in enumerate(parameters)}
        self._may_change = False

    def begin_step(self, trained: tuple[bool, ...], *, may_change: bool) -> None:
        """Take over which parameters are trained, because between steps the script may freeze anything.

        Args:
            trained: for each parameter, the same on all ranks.
            may_change: the step function may freeze and unfreeze parameters.
        """
        self._may_change = may_change
        for (_, tag), wanted in zip(self._parameters, trained, strict=True):
            tag.requires_grad = wanted
        # Hashes of booleans are the same in every process, so ranks agree without communication.
        self.epoch = hash(trained)

    def change(self, parameter: nn.Parameter, tag: Tag, wanted: bool) -> None:
        """Change a parameter's ``requires_grad`` inside a step, on this rank and in what all ranks know.

        Raises:
            SMPUnsupportedError: microbatches take turns, or replicas reduce gradients.
        """
        if not self._may_change:
            raise SMPUnsupportedError(
                f"requires_grad of a parameter of shape {tuple(parameter.shape)} was changed inside a "
                "smp.step function. The microbatches of a step share its parameters and take turns, and "
                "replicas reduce what one backward finds: change it between steps. With one replica, "
                "microbatches or active_microbatches may be set to 1 instead"
            )
        with without_interception():
            parameter.requires_grad_(wanted)
        tag.requires_grad = wanted
        self.epoch = hash((self.epoch, self._numbers[tag], wanted))

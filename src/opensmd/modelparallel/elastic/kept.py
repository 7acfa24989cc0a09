"""Saving what a step changes before the optimizer's step, in case it has to be repeated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from opensmd.modelparallel._torch_internals import without_interception
from opensmd.modelparallel.checkpoint.saving.random_states import random_states, set_random_states
from opensmd.modelparallel.dry_run.restoring import KeptModel
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder
from opensmd.modelparallel.wrapped import WrappedModel

__all__ = ["KeptStep"]


class KeptStep:
    """Gradients, buffers, module attributes and random states before a step's microbatches.

    Args:
        model: the placed model whose step it is.

    Raises:
        SMPError: the model is on a GPU.
    """

    def __init__(self, model: WrappedModel) -> None:
        module = model.get_module()
        with without_interception():
            self._parameters = {
                name: parameter for name, parameter in module.named_parameters() if model.is_here(name)
            }
            _require_cpu(self._parameters)
            buffers = [
                buffer
                for name, buffer in module.named_buffers()
                if model.is_here(name) and not isinstance(buffer, Placeholder)
            ]
            self._model = KeptModel(module, list(self._parameters.values()), buffers)
            self._gradients = [
                (parameter.grad, parameter.grad.detach().clone())
                for parameter in self._parameters.values()
                if parameter.grad is not None
            ]
        self._versions = {name: parameter._version for name, parameter in self._parameters.items()}
        self._random = random_states()

    def put_back(self) -> None:
        """Restore everything.

        Raises:
            SMPError: the step has changed parameters, which are not saved.
        """
        with without_interception(), torch.no_grad():
            self._model.put_back()
            for gradient, numbers in self._gradients:
                gradient.copy_(numbers)
        changed = [
            name for name, parameter in self._parameters.items() if parameter._version != self._versions[name]
        ]
        if changed:
            raise SMPError(
                f"a replica was lost in a step that changes parameters itself ({', '.join(changed[:3])}), so "
                "that it cannot be done again: change them after the step"
            )
        set_random_states(self._random)


def _require_cpu(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise on a GPU, where NCCL kernels would wait forever for a replica that is lost within a step."""
    for name, parameter in parameters.items():
        if not parameter.is_cpu:
            raise SMPError(
                f"the setting elastic: {name} is on {parameter.device}, and replicas that come and go are "
                "only for models on the CPU, as collectives of a GPU do not end when a replica is lost. "
                "Leave the setting out, and go on from checkpoints"
            )

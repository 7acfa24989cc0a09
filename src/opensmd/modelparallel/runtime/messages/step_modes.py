"""What is trained, and which modules are in training mode: all ranks need to know, and begin each step alike.

Usually every rank freezes and switches the same, and comparing one number is enough. A script may also do so
only where something lives, as with ``model.local_parameters()``; the other ranks then follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch.distributed as dist
from torch import nn

from opensmd.modelparallel._torch_internals import without_interception
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.exchange import exchange

__all__ = ["StepModes"]


class StepModes:
    """``requires_grad`` of a model's parameters and ``training`` of its modules.

    Args:
        parameters: all of them, with their names and the pipeline ranks where they live.
        modules: those that any rank calls, likewise.

    Attributes:
        trained: ``requires_grad`` of each parameter when the modes were last read.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter, int]],
        modules: Sequence[tuple[str, nn.Module, int]],
    ) -> None:
        self._parameters = [parameter for _, parameter, _ in parameters]
        self._modules = [module for _, module, _ in modules]
        self._shown = [
            *(f"requires_grad of parameter {name!r}" for name, *_ in parameters),
            *(f"training of module {name!r}" if name else "training of the model" for name, *_ in modules),
        ]
        self._homes = [home for *_, home in (*parameters, *modules)]
        self._read()
        self._agreed = self._modes

    def number(self) -> int:
        """Read the modes; return a number that ranks with the same modes have in common."""
        self._read()
        # Hashes of booleans are the same in every process.
        return hash(self._modes)

    def have_agreed(self) -> None:
        """Note that all ranks have read the same."""
        self._agreed = self._modes

    def follow_homes(self, group: dist.ProcessGroup) -> None:
        """Take each mode from the rank where its parameter or module lives; on all ranks, after reading.

        Raises:
            SMPError: a rank has changed a mode that the rank where it lives has left as it was.
        """
        gathered = exchange((self._agreed, self._modes), group)
        before, now = zip(*gathered, strict=True)
        for place, home in enumerate(self._homes):
            for rank in range(group.size()):
                differs = now[rank][place] != now[home][place] and now[home][place] == before[home][place]
                if differs or before[rank][place] != before[home][place]:
                    self._refuse(place, now[home][place], rank)
        self._set(tuple(now[home][place] for place, home in enumerate(self._homes)))

    def _refuse(self, place: int, mode: bool, rank: int) -> NoReturn:
        raise SMPError(
            f"{self._shown[place]} is {mode} on pipeline rank {self._homes[place]}, where it lives, and "
            f"{not mode} on pipeline rank {rank}. Freeze parameters and switch modes on all ranks or, after "
            "the first step, where they live (model.local_parameters(), model.local_modules()); an "
            "`if smp.rank() == 0:` around it is the usual cause"
        )

    def _read(self) -> None:
        with without_interception():  # parameters of other ranks have a guarded class
            self.trained = tuple([parameter.requires_grad for parameter in self._parameters])
        self._modes = (*self.trained, *[module.training for module in self._modules])

    def _set(self, modes: tuple[bool, ...]) -> None:
        with without_interception():
            for parameter, trained in zip(self._parameters, modes, strict=False):
                parameter.requires_grad_(trained)
        for module, training in zip(self._modules, modes[len(self._parameters) :], strict=True):
            module.training = training
        self._read()
        self.have_agreed()

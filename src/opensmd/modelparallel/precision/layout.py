"""How plain PyTorch numbers an optimizer's parameters, of which a rank keeps some.

State dicts of the whole optimizer use these numbers; a rank's optimizer has others::

    whole       group 0: 0 1 2    group 1: 3 4
    this rank   group 0:   1      group 1: 3        numbered 0 and 1 by torch

Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.wrapped import WrappedModel
from opensmd.optim.param_groups import params_of

__all__ = ["Layout", "names_in"]

ParameterGroup = dict[str, Any]


def names_in(model: WrappedModel, parameters: Sequence[nn.Parameter], first: int = 0) -> list[str]:
    """The module's names of an optimizer's parameters.

    Args:
        first: the number of the first of them, for the message.

    Raises:
        ValueError: one is not a parameter of the model.
    """
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    for number, parameter in enumerate(parameters, first):
        if id(parameter) in names:
            continue
        what = f"parameter {number} of the optimizer, of shape {tuple(parameter.shape)},"
        if model.has_replaced(parameter):
            raise ValueError(
                f"{what} is not in the model any more, which has distributed modules now: make the optimizer "
                "of model.parameters() after smp.DistributedModel"
            )
        raise ValueError(
            f"{what} is not a parameter of the DistributedModel's module; give the optimizer only parameters "
            "of this model"
        )
    return [names[id(parameter)] for parameter in parameters]


@dataclass
class Layout:
    """The whole optimizer's parameters, as plain PyTorch numbers them.

    Attributes:
        model: the parameters' model.
        numbers: for every group, the numbers of all its parameters.
        names: for every group, the names that the script gave with its parameters, if any.
        full_names: the module's name of every parameter, by number.
        shapes: the shape of every parameter, by number.
        local: the number of each parameter of this rank, by identity.
    """

    model: WrappedModel
    numbers: list[list[int]] = field(default_factory=list)
    names: list[list[str] | None] = field(default_factory=list)
    full_names: list[str] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    local: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of parameters in the whole optimizer."""
        return sum(map(len, self.numbers))

    @property
    def is_of_one_rank(self) -> bool:
        """Whether all parameters live on one pipeline rank, or the optimizer may be of this rank's alone."""
        return len({self.model.home_of(name) for name in self.full_names}) == 1

    def cut(self, group: ParameterGroup, state: MutableMapping[nn.Parameter, Any]) -> None:
        """Remove remote parameters from another group, and their state from the optimizer.

        Raises:
            ValueError: a parameter is not the model's.
        """
        model = self.model
        first = self.count
        current = [model.current(original) for original in group["params"]]
        names = names_in(model, current, first)  # checked before anything is changed
        self.numbers.append(list(range(first, first + len(current))))
        self.names.append(group.get("param_names"))
        kept = []
        for position, (original, parameter, name) in enumerate(
            zip(group["params"], current, names, strict=True)
        ):
            if parameter is not original and original in state:
                state[parameter] = state.pop(original)
            self.full_names.append(name)
            self.shapes.append(parameter.shape)
            if model.is_local(name):
                kept.append(position)
                self.local[id(parameter)] = first + position
            else:
                state.pop(parameter, None)
        group["params"] = [current[position] for position in kept]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][position] for position in kept]

    def follow_plan(self, groups: Sequence[ParameterGroup], state: MutableMapping[nn.Parameter, Any]) -> None:
        """After parts of the model have moved, adapt the groups and the state to this rank's parameters."""
        parameters = dict(self.model.module.named_parameters())
        self.local.clear()
        for group, group_numbers, names in zip(groups, self.numbers, self.names, strict=True):
            kept = [number for number in group_numbers if self.model.is_local(self.full_names[number])]
            group["params"] = [parameters[self.full_names[number]] for number in kept]
            self.local.update(zip(map(id, group["params"]), kept, strict=True))
            if names is not None:
                group["param_names"] = [names[number - group_numbers[0]] for number in kept]
        for parameter in [parameter for parameter in state if id(parameter) not in self.local]:
            if isinstance(parameter, torch.Tensor):  # others are the optimizer's own
                del state[parameter]

    def renumbered(self, plain: Mapping[str, Any], groups: Sequence[ParameterGroup]) -> dict[str, Any]:
        """Return this rank's state dict under the whole optimizer's numbers.

        Args:
            plain: the state dict under this rank's own numbers.
            groups: this rank's groups.
        """
        own = self._numbers_of(groups)
        whole = []
        for group, numbers, names in zip(plain["param_groups"], self.numbers, self.names, strict=True):
            group = {**group, "params": list(numbers)}
            if names is not None:
                group["param_names"] = list(names)
            whole.append(group)
        numbered = {own[key] if isinstance(key, int) else key: value for key, value in plain["state"].items()}
        return {"state": numbered, "param_groups": whole}

    def localised(self, state_dict: Mapping[str, Any], groups: Sequence[ParameterGroup]) -> dict[str, Any]:
        """Return this rank's part of a full state dict; the reverse of :meth:`renumbered`."""
        stored = params_of(state_dict["param_groups"])
        saved = state_dict["state"]
        own = {
            new: saved[stored[old]]
            for new, old in enumerate(self._numbers_of(groups))
            if stored[old] in saved
        }
        first = 0
        local = []
        for group, own_group in zip(state_dict["param_groups"], groups, strict=True):
            group = {**group, "params": list(range(first, first + len(own_group["params"])))}
            group.pop("param_names", None)
            if "param_names" in own_group:
                group["param_names"] = list(own_group["param_names"])
            local.append(group)
            first += len(own_group["params"])
        others = {key: value for key, value in saved.items() if not isinstance(key, int)}
        return {**state_dict, "state": {**own, **others}, "param_groups": local}

    def _numbers_of(self, groups: Sequence[ParameterGroup]) -> list[int]:
        """Return the whole optimizer's numbers of this rank's parameters, in order."""
        return [self.local[id(parameter)] for parameter in params_of(groups)]

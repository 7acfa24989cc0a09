"""The one object that ``smp.init`` fills: settings, rank grid, process groups, the wrapped model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from opensmd.modelparallel.exceptions import SMPNotInitializedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from opensmd.modelparallel.amp import GradScaler
    from opensmd.modelparallel.config import Config
    from opensmd.modelparallel.ranks.grid import RankGrid
    from opensmd.modelparallel.ranks.groups import Groups
    from opensmd.modelparallel.state_dicts.model_state import ModelState

__all__ = ["ModuleManager", "State", "state"]


@dataclass
class ModuleManager:
    """What scripts read under ``smp.state.module_manager``.

    Attributes:
        translate_functions: pairs of functions between Hugging Face's and distributed modules' state dicts;
            empty, because there are no distributed modules.
    """

    translate_functions: list[tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=list)


class State:
    """Everything about this process that lives from ``smp.init`` to the end of the script.

    Attributes:
        rank: the global rank of this process.
        engine: what runs steps; set when the model has been partitioned.
        model: the script's DistributedModel.
        optimizers: the script's DistributedOptimizers by identity, the latest last.
        scalers: the script's GradScalers, in the order in which it made them.
        owns_world: ``smp.init`` made torch's default group, so the end of the process destroys it.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, as before ``smp.init``."""
        self._cfg: Config | None = None
        self._grid: RankGrid | None = None
        self._groups: Groups | None = None
        self.rank = 0
        self.model: ModelState | None = None
        self.optimizers: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()
        self.scalers: WeakValueDictionary[int, GradScaler] = WeakValueDictionary()
        self.engine: Any = None
        self.owns_world = False
        self.module_manager = ModuleManager()

    def fill(self, *, cfg: Config, grid: RankGrid, groups: Groups, rank: int, owns_world: bool) -> None:
        """Become initialised."""
        self._cfg, self._grid, self._groups = cfg, grid, groups
        self.rank, self.owns_world = rank, owns_world

    @property
    def initialized(self) -> bool:
        """True after ``smp.init``."""
        return self._cfg is not None

    def require(self, name: str = "this function") -> State:
        """This object, if initialised.

        Raises:
            SMPNotInitializedError: ``smp.init`` has not been called; the message says by whom it is needed.
        """
        if not self.initialized:
            raise SMPNotInitializedError(
                f"{name} needs model parallelism to be initialised: call smp.init() first, at the start of "
                "the script"
            )
        return self

    @property
    def cfg(self) -> Config:
        """The effective settings."""
        self.require("smp.state.cfg")
        assert self._cfg is not None
        return self._cfg

    @property
    def grid(self) -> RankGrid:
        """Where each rank stands."""
        self.require("the rank grid")
        assert self._grid is not None
        return self._grid

    @property
    def groups(self) -> Groups:
        """The process groups of this rank."""
        self.require("process groups")
        assert self._groups is not None
        return self._groups

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The script's latest DistributedOptimizer."""
        return next(reversed(list(self.optimizers.values())), None)

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """For every rank of the tensor-parallel group, here one: parameters' names by optimizer number."""
        from opensmd.modelparallel.optimizer import parameter_names  # which imports this module

        return [dict(enumerate(parameter_names(self.optimizer)))]

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """For every rank of the tensor-parallel group, here one: optimizer numbers by parameters' names."""
        return [{name: number for number, name in each.items()} for each in self.param_index_to_name_tp_group]

    def __repr__(self) -> str:
        if not self.initialized:
            return "<model parallelism, not initialised>"
        return f"<model parallelism, rank {self.rank} of {self.grid.size}: {self.cfg!r}>"


state = State()

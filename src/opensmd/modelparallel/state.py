"""The one object that ``smp.init`` fills: settings, rank grid, process groups, the wrapped model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from opensmd.collectives.locality import Locality
from opensmd.modelparallel.exceptions import SMPError, SMPNotInitializedError
from opensmd.modelparallel.wrapped import (
    ElasticReplicas,
    SharedScale,
    WrappedModel,
    WrappedOptimizer,
    WrappedScaler,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from opensmd.modelparallel.offloading.offloading import Offloading
    from opensmd.modelparallel.ranks.grid import RankGrid
    from opensmd.modelparallel.ranks.groups import Groups
    from opensmd.modelparallel.runtime.engine import Engine
    from opensmd.modelparallel.settings.config import Config

__all__ = ["ModuleManager", "State", "state"]


@dataclass
class ModuleManager:
    """What scripts read from ``smp.state.module_manager``.

    Attributes:
        translate_functions: for each architecture that smp.DistributedModel has distributed, the functions
            that translate state dicts of distributed modules to Hugging Face's and back.
    """

    translate_functions: list[tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=list)


@dataclass(frozen=True)
class _Initialised:
    """All that exists from ``smp.init`` on."""

    cfg: Config
    grid: RankGrid
    groups: Groups


class State:
    """Everything about this process that lasts from ``smp.init`` to the end of the script.

    Attributes:
        rank: the global rank of this process.
        locality: its place among the ranks of its host.
        engine: what runs steps; set when the model has been partitioned.
        model: the script's DistributedModel.
        optimizers: the script's DistributedOptimizers by identity, the latest last.
        scalers: the script's GradScalers in order of creation, and the loss scale.
        offloading: of checkpointed activations; None without the setting offload_activations.
        checkpointed_layers: those that the setting ``auto`` wants recomputed in backward.
        loss_scale: of the settings fp16 and bf16; None without a DistributedOptimizer.
        elastic: the job's changing set of replicas; None without the setting elastic.
        sharding_mesh: the mesh over which parameters are sharded; None if they are not.
        undoing: what ``smp.shutdown`` calls, for example to restore torch's own functions.
        owns_world: whether ``smp.init`` created torch's default group, which is then destroyed at exit.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, as before ``smp.init``."""
        self._initialised: _Initialised | None = None
        self.rank = 0
        self.locality = Locality(0, 1)
        self.model: WrappedModel | None = None
        self.optimizers: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()
        self.scalers: WeakValueDictionary[int, WrappedScaler] = WeakValueDictionary()
        self.loss_scale: SharedScale | None = None
        self.checkpointed_layers: tuple[str, ...] = ()
        self.offloading: Offloading | None = None
        self.engine: Engine | None = None
        self.elastic: ElasticReplicas | None = None
        self.sharding_mesh: DeviceMesh | None = None
        self.undoing: list[Callable[[], None]] = []
        self.owns_world = False
        self.module_manager = ModuleManager()

    def fill(
        self,
        *,
        cfg: Config,
        grid: RankGrid,
        groups: Groups,
        rank: int,
        locality: Locality,
        owns_world: bool,
    ) -> None:
        """Store what ``smp.init`` has created."""
        self.refill(cfg=cfg, grid=grid, groups=groups)
        self.rank, self.locality, self.owns_world = rank, locality, owns_world

    def refill(self, *, cfg: Config, grid: RankGrid, groups: Groups) -> None:
        """Replace the settings for the same ranks."""
        self._initialised = _Initialised(cfg, grid, groups)

    @property
    def initialized(self) -> bool:
        """True after ``smp.init``."""
        return self._initialised is not None

    def require(self, name: str) -> State:
        """Return this object if it is initialised.

        Raises:
            SMPNotInitializedError: ``smp.init`` has not been called; the message names the caller that needs
                it.
        """
        self._required(name)
        return self

    @property
    def cfg(self) -> Config:
        """The effective settings."""
        return self._required("smp.state.cfg").cfg

    @property
    def grid(self) -> RankGrid:
        """The position of each rank."""
        return self._required("the rank grid").grid

    @property
    def groups(self) -> Groups:
        """The process groups of this rank."""
        return self._required("process groups").groups

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The script's latest DistributedOptimizer."""
        return next(reversed(list(self.optimizers.values())), None)

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """For every rank of the tensor-parallel group, parameter names by optimizer number."""
        return [dict(enumerate(self._parameter_names())) for _ in range(self.cfg.tensor_parallel_degree)]

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """For every rank of the tensor-parallel group, optimizer numbers by parameter name."""
        return [
            {name: number for number, name in names.items()} for names in self.param_index_to_name_tp_group
        ]

    def cut_optimizers(self, model: WrappedModel) -> None:
        """Cut every distributed optimizer to the parameters of this rank."""
        for optimizer in self._wrapped_optimizers():
            optimizer._smp_after_partition(model)

    def follow_plan(self) -> None:
        """Give every distributed optimizer the parameters that are now on this rank, and no others."""
        for optimizer in self._wrapped_optimizers():
            optimizer._smp_follow_plan()

    def follow_groups(self) -> None:
        """Tell every distributed optimizer that the process groups have been replaced."""
        for optimizer in self._wrapped_optimizers():
            optimizer._smp_follow_groups()

    def follow_device(self) -> None:
        """Tell every distributed optimizer that the model has moved to another device."""
        for optimizer in self._wrapped_optimizers():
            optimizer._smp_follow_device()

    def follow_model(self) -> None:
        """Tell every distributed optimizer that the model's parameters have new values."""
        for optimizer in self._wrapped_optimizers():
            optimizer._smp_follow_model()

    def _wrapped_optimizers(self) -> Iterator[WrappedOptimizer]:
        for optimizer in self.optimizers.values():
            assert isinstance(optimizer, WrappedOptimizer)  # all that DistributedOptimizer adds
            yield optimizer

    def _required(self, name: str) -> _Initialised:
        if self._initialised is None:
            raise SMPNotInitializedError(
                f"{name} needs model parallelism to be initialised: call smp.init() first, at the start of "
                "the script"
            )
        return self._initialised

    def _parameter_names(self) -> list[str]:
        """Return the module's names of the latest optimizer's parameters, in its order.

        Raises:
            SMPError: there is no distributed optimizer, or no model that its parameters could belong to.
        """
        optimizer = self.optimizer
        if not isinstance(optimizer, WrappedOptimizer):
            raise SMPError(
                "parameters have numbers once smp.DistributedOptimizer has been given their optimizer"
            )
        return optimizer._smp_names()

    def __repr__(self) -> str:
        if not self.initialized:
            return "<model parallelism, not initialised>"
        return f"<model parallelism, rank {self.rank} of {self.grid.size}: {self.cfg!r}>"


state = State()

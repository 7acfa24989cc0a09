"""What one run of a model showed: the pure data that goes from capture to the partitioner.

The run is divided into *units*. A unit starts where a module is entered on the way to the next one that calls
no other module, and ends where the next unit starts. Operations that follow in the modules around it belong
to it, because they follow its data. A module that is called again belongs to the unit of its first call. A
plan can only cut between units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from opensmd.modelparallel.planning.plan import ancestors

__all__ = ["Edge", "Escape", "ModelTrace", "ModuleInfo", "Reuse", "Unit"]


@dataclass(frozen=True, kw_only=True)
class ModuleInfo:
    """One module of the tree. Sizes are those of its own parameters and buffers, without its children's.

    ``opaque`` modules are never split; a ``container`` has no forward, so others call its children;
    ``operations`` counts those that it ran itself, outside its children. What several modules share and is
    ``everywhere`` runs with each of them: an activation function, which has nothing of its own.
    """

    name: str
    kind: str
    parameters: int = 0
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    buffer_bytes: int = 0
    calls: int = 0
    operations: int = 0
    opaque: bool = False
    container: bool = False
    everywhere: bool = False


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The smallest thing that can be placed: ``module`` with the operations that follow it.

    Seconds, floating-point operations and bytes are those of all its calls in one microbatch. ``module`` is
    the outermost module that was entered where the unit starts. The ``late`` fields are for late weight
    gradients: inputs and gradients kept for them, and their share of the backward's seconds.
    """

    module: str
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    flops: float = 0.0
    activation_bytes: int = 0
    late_input_bytes: int = 0
    late_gradient_bytes: int = 0
    late_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A tensor of unit ``source`` that unit ``target`` uses (indices into :attr:`ModelTrace.units`).

    Edges with the same ``tensor`` number are one tensor with several uses.
    """

    source: int
    target: int
    bytes: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """A parameter that several units use, even if only one module owns it.

    It is ``bound`` if a module that runs as a whole has read it without owning or receiving it; then both
    must be on one rank.
    """

    bytes: int
    units: tuple[int, ...]
    name: str = ""
    bound: bool = False


@dataclass(frozen=True, kw_only=True)
class Escape:
    """A tensor that a forward hook carried past the modules ``inside``, to a use in the call ``around`` them.

    ``around`` is None if the use is outside the model.
    """

    inside: frozenset[str]
    around: str | None


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """A model's tree in registration order and its units in execution order.

    ``modules`` has each module object once; ``aliases`` maps every further name to the first. ``uses`` says
    in which unit a module's own parameters are first used (absent if no operation touched them). ``shared``
    are groups of parameter names that are one tensor, or share memory. ``hooked`` are modules with forward
    hooks, and ``escapes`` what such hooks carried away. ``guests`` are pairs of a module and one that was
    called in it without being a submodule, such as an argument. ``measured`` is True for measured times,
    False for estimates.
    """

    modules: Mapping[str, ModuleInfo]
    units: tuple[Unit, ...]
    edges: tuple[Edge, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    uses: Mapping[str, int] = field(default_factory=dict)
    shared: tuple[tuple[str, ...], ...] = ()
    reuses: tuple[Reuse, ...] = ()
    hooked: frozenset[str] = frozenset()
    escapes: frozenset[Escape] = frozenset()
    guests: frozenset[tuple[str, str]] = frozenset()
    measured: bool = False

    def owner(self, parameter: str) -> str:
        """Return the first name of the module that owns a parameter, given the parameter's full name."""
        module = parameter.rpartition(".")[0]
        return self.aliases.get(module, module)

    @cached_property
    def anchors(self) -> dict[str, int]:
        """Return the unit that decides each module's stage.

        It is the one where its own parameters are first used, else the first unit inside it, else its
        parent's.
        """
        first_inside: dict[str, int] = {}
        for index, unit in reversed(list(enumerate(self.units))):
            for name in (unit.module, *ancestors(unit.module)):
                first_inside[name] = index
        anchors: dict[str, int] = {}
        for name in self.modules:
            anchor = self.uses.get(name, first_inside.get(name))
            anchors[name] = anchors.get(name.rpartition(".")[0], 0) if anchor is None else anchor
        return anchors

    @cached_property
    def deciders(self) -> list[str]:
        """The module that decides each unit's stage: a user of parameters in it, else the entered one."""
        users = {unit: name for name, unit in reversed(list(self.uses.items()))}
        return [users.get(index, unit.module) for index, unit in enumerate(self.units)]

    def training_bytes(self, optimizer_bytes: float) -> list[float]:
        """Return the bytes of parameters, buffers, gradients and optimizer state of every unit."""
        total = [0.0] * len(self.units)
        for name, info in self.modules.items():
            state = info.parameter_bytes + info.buffer_bytes + info.trainable_bytes * (1 + optimizer_bytes)
            total[self.anchors[name]] += state
        return total

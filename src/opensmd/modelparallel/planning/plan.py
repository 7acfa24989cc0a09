"""The plan: which pipeline stage every module lives on, and what that is expected to cost.

A plan is pure data: one rank makes it, the others receive it as JSON, the engine places modules by it and the
report prints it. Nothing here knows how it was found.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from opensmd.modelparallel.planning.schedules.tables import ChunkTimes

__all__ = ["Crossing", "Plan", "PlanRow", "SharedParameter", "StageLoad", "ancestors", "is_inside", "nearest"]


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """What one stage is expected to need.

    Times are seconds per microbatch. ``training_bytes`` are parameters, gradients and optimizer state;
    ``activation_bytes`` are what one microbatch keeps from forward to backward; ``in_flight`` is how many
    microbatches are between the two. Weight gradients may be computed late: until then a microbatch keeps
    ``late_input_bytes`` of its activations plus ``late_gradient_bytes``, and they take ``late_seconds`` of
    the backward. ``late`` is how many microbatches keep anything at most, for that or between forward and
    backward; 0 if nothing is computed late. ``new_gradient_bytes`` are weight gradients next to the ones they
    are added to.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    parameter_bytes: int = 0
    training_bytes: int = 0
    activation_bytes: int = 0
    in_flight: int = 1
    late: int = 0
    late_input_bytes: int = 0
    late_gradient_bytes: int = 0
    late_seconds: float = 0.0
    new_gradient_bytes: int = 0

    @property
    def seconds(self) -> float:
        """The time of forward and backward of one microbatch."""
        return self.forward_seconds + self.backward_seconds

    @property
    def times(self) -> ChunkTimes:
        """The same for a schedule, with weight gradients separate if they are computed late."""
        late = self.late_seconds if self.late else 0.0
        return ChunkTimes(self.forward_seconds, self.backward_seconds - late, late)

    @property
    def memory_bytes(self) -> int:
        """The expected peak: training state, new gradients, and the most that microbatches keep at once."""
        return self.training_bytes + self.new_gradient_bytes + self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        """The most that microbatches keep at once.

        That is the activations of all in flight, or what those and ``done`` late ones keep if the rank has
        found no time for any of the latter.
        """
        kept = [self.in_flight * self.activation_bytes]
        for done in range(self.late):
            waiting = done * (self.late_input_bytes + self.late_gradient_bytes)
            # one is in its backward, whose first part keeps everything until it ends
            bytes_in_flight = min(self.in_flight, self.late - done) * self.activation_bytes
            kept.append(waiting + bytes_in_flight + self.late_gradient_bytes)
        return max(kept)

    @property
    def waiting_bytes(self) -> int:
        """The most that pending weight gradients of all microbatches keep."""
        return self.late * (self.late_input_bytes + self.late_gradient_bytes)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What one microbatch's forward sends from one stage to another (backward returns as much).

    Attributes:
        seconds: what it costs each of the two.
        between_hosts: whether the stages are on different hosts.
    """

    source: int
    target: int
    tensors: int
    bytes: int
    seconds: float = 0.0
    between_hosts: bool = False


@dataclass(frozen=True, kw_only=True)
class SharedParameter:
    """A tensor with several names; it and the modules that own it live on one stage."""

    names: tuple[str, ...]
    home: int


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One line of the plan: a module that is whole on one stage, or a split module's own part."""

    module: str
    kind: str
    stage: int
    parameters: int = 0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    seconds: float = 0.0
    crossing_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where everything lives.

    ``homes`` has every name from ``named_modules(remove_duplicate=False)``, including the root (""). The
    stage of a split module is that of its own parameters and buffers. ``opened`` modules are treated like
    split ones even if they live on one stage; ``hooked`` ones had visible forward hooks. ``containers`` have
    no forward; an outer module calls their children. With ``virtual_stages``, a microbatch passes every stage
    that many times.

    Raises:
        ValueError: no stage, no root, or a home that is not a stage.
    """

    stages: int
    homes: Mapping[str, int]
    shared: tuple[SharedParameter, ...] = ()
    loads: tuple[StageLoad, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    rows: tuple[PlanRow, ...] = ()
    notes: tuple[str, ...] = field(default=())
    opened: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"a plan needs at least one stage, got {self.stages}")
        if "" not in self.homes:
            raise ValueError("a plan needs a stage for the root module, whose name is ''")
        for name, home in self.homes.items():
            if not 0 <= home < self.stages:
                raise ValueError(
                    f"module {name!r} is placed on stage {home}, but stages go from 0 to {self.stages - 1}"
                )

    def parameter_home(self, name: str) -> int:
        """Return the stage of a parameter or buffer, given its full name."""
        return self.homes[name.rpartition(".")[0]]

    def split(self) -> set[str]:
        """The names of modules that do not run as a whole.

        These are modules with several stages, opened ones, and containers in these.
        """
        below: dict[str, set[int]] = {}
        for name, home in self.homes.items():
            for ancestor in (name, *ancestors(name)):
                below.setdefault(ancestor, set()).add(home)
        split_modules = {name for name in self.homes if len(below[name]) > 1}.union(self.opened)
        for name in sorted(self.containers):  # outer ones first
            if name == "" or name.rpartition(".")[0] in split_modules:
                split_modules.add(name)
        return split_modules

    def atomic(self) -> dict[str, int]:
        """The largest subtrees on a single stage, and that stage."""
        split = self.split()
        return {
            name: home
            for name, home in self.homes.items()
            if name not in split and (name == "" or name.rpartition(".")[0] in split)
        }

    def to_json(self) -> str:
        """Return the plan as text, for other ranks or a file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that :meth:`to_json` wrote.

        Raises:
            ValueError: the text is not a plan.
        """
        try:
            fields = json.loads(text)
            return cls(
                stages=fields["stages"],
                homes=fields["homes"],
                shared=tuple(
                    SharedParameter(names=tuple(shared["names"]), home=shared["home"])
                    for shared in fields["shared"]
                ),
                loads=tuple(StageLoad(**load) for load in fields["loads"]),
                crossings=tuple(Crossing(**crossing) for crossing in fields["crossings"]),
                rows=tuple(PlanRow(**row) for row in fields["rows"]),
                notes=tuple(fields["notes"]),
                opened=tuple(fields["opened"]),
                hooked=tuple(fields["hooked"]),
                containers=tuple(fields["containers"]),
                virtual_stages=fields["virtual_stages"],
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"this text is not a partition plan: {error!r}") from error

    def __str__(self) -> str:
        lines = [f"{self.stages} stages"]
        for row in self.rows:
            name = row.module or "(root)"
            lines.append(
                f"  stage {row.stage}  {name} ({row.kind}): {row.parameters:,} parameters, "
                f"{row.seconds * 1e3:.2f} ms"
            )
        return "\n".join(lines)


def ancestors(name: str) -> Iterator[str]:
    """Return the names of the modules around ``name``, the nearest first, the root ("") last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def nearest(name: str, among: Container[str]) -> str | None:
    """Return the module ``name``, or the nearest one around it, that is ``among`` these; None without any."""
    return next((around for around in (name, *ancestors(name)) if around in among), None)


def is_inside(name: str, around: str) -> bool:
    """Whether ``around`` is the module ``name`` or contains it."""
    return around in ("", name) or name.startswith(f"{around}.")

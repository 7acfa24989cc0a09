"""The partitioner: from what a run of the model showed to a stage for every module; pure.

1. Units without parameters run with those before them unless the balance gains much, and never on their own.
2. Units that share a parameter leave the sequence and go with the first or the last of their group, whichever
   balances better; units placed by hand against the order stay where they were put.
3. The sequence is cut (:mod:`.balance`) so that the worst stage's
   ``(1 - memory_weight) * time + memory_weight * memory`` is smallest, both as shares of the whole model's.
   The time of a cut is that of the tensors and messages that cross it, in shared memory or between hosts.
4. Every module gets the stage of its units; modules that never ran get their parent's.

The rules are those of SageMaker's documentation of automated model splitting.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from opensmd.modelparallel.planning.plan import Plan, SharedParameter, nearest
from opensmd.modelparallel.planning.predict import StepShape, predict
from opensmd.modelparallel.planning.split_modules import with_opened
from opensmd.modelparallel.planning.trace import ModelTrace
from opensmd.modelparallel.planning.units import Link, Links, UnitGroups, UnitSequence, Weights

__all__ = ["manual_partition", "partition"]


def partition(
    trace: ModelTrace,
    stages: int,
    *,
    memory_weight: float = 0.8,
    fixed: Mapping[str, int] | None = None,
    saved: Mapping[str, int] | None = None,
    microbatches: int = 1,
    active_microbatches: int | None = None,
    late_microbatches: int | None = None,
    optimizer_bytes: float = 2.0,
    virtual_stages: Sequence[Sequence[int]] | None = None,
    links: Links | None = None,
) -> Plan:
    """Place every module of ``trace`` on one of ``stages`` pipeline stages.

    Args:
        trace: the model's tree and units in execution order.
        stages: the number of stages; with fewer units, some stages stay empty.
        memory_weight: 0 balances only time, 1 only memory. The default is that of ``optimize="memory"``;
            ``optimize="speed"`` uses 0.2.
        fixed: stages of modules, by name. An entry also applies to all submodules without their own.
        saved: stages where a checkpoint has modules' own parameters and buffers, by name; ``fixed`` has
            precedence. Names that are not the model's have no effect.
        microbatches, active_microbatches: bounds on how many microbatches' activations a stage holds.
        late_microbatches: a bound on the microbatches with late weight gradients on a stage; by default, as
            many as may be active. 0 if the order of work is fixed.
        optimizer_bytes: bytes of optimizer state per byte of trainable parameters (Adam: 2).
        virtual_stages: for each stage, which pieces of the model it has, counted in execution order
            (:func:`.schedules.tables.in_a_v`); by default one each, in order. With several, fixed modules are
            put in place after the others have been balanced.
        links: those between the stages; by default, all are on one host.

    Raises:
        ValueError: ``stages`` or ``memory_weight`` out of range; ``fixed`` names an unknown module or stage.
    """
    if stages < 1:
        raise ValueError(f"partitions must be at least 1, got {stages}")
    if not 0.0 <= memory_weight <= 1.0:
        raise ValueError(f"memory_weight must be between 0 and 1, got {memory_weight}")
    by_hand = _inherit(trace, fixed or {}, stages)
    kept = _kept(trace, saved or {}, by_hand, stages)
    step = StepShape.of(
        stages,
        microbatches=microbatches,
        active_microbatches=active_microbatches,
        late_microbatches=late_microbatches,
        optimizer_bytes=optimizer_bytes,
        links=links,
    )
    pieces = 1 if virtual_stages is None else len(virtual_stages[0])
    held = step.in_flight(stages, chain=pieces == 1)
    places = kept | by_hand
    wanted = {unit: places[name] for unit, name in enumerate(trace.deciders) if name in places}
    if virtual_stages is not None:
        wanted = {}
        held *= pieces
    every = virtual_stages or [[stage] for stage in range(stages)]
    stage_of = {piece: stage for stage, own in enumerate(every) for piece in own}
    along = [step.links.between(stage_of[piece], stage_of[piece + 1]) for piece in range(stages * pieces - 1)]
    of_pieces = _balanced(trace, wanted, Weights(memory_weight, optimizer_bytes, held), along)
    of_units = {unit: stage_of[piece] for unit, piece in of_pieces.items()}
    return _plan(trace, stages, _homes(trace, of_units, by_hand, kept), step, virtual_stages=pieces)


def _balanced(
    trace: ModelTrace, wanted: Mapping[int, int], weights: Weights, along: Sequence[Link]
) -> dict[int, int]:
    """Return the piece of every unit according to the best cut.

    Args:
        trace: that of the model.
        wanted: the stages of units placed by hand.
        weights: what makes a cut good.
        along: the link from each piece but the last to the next.
    """
    groups = UnitGroups.of(trace, wanted)
    best: tuple[tuple[float, float], dict[int, int]] | None = None
    for leads, keep in itertools.product(groups.candidates(), (True, False) if wanted else (True,)):
        sequence = UnitSequence.of(trace, groups, leads, wanted=wanted, keep_fixed=keep)
        split = sequence.cut(weights, along)
        rank = (split.worst, split.cut_cost)
        if best is None or rank < _slightly_worse(best[0]):
            best = rank, sequence.stages_of_units(split)
    assert best is not None  # there is always a candidate
    return best[1]


def manual_partition(
    trace: ModelTrace,
    stages: int,
    *,
    fixed: Mapping[str, int],
    default: int,
    step: StepShape | None = None,
) -> Plan:
    """Place modules according to ``fixed`` and all others on stage ``default`` (``auto_partition: False``).

    Modules that share a parameter go together, to the stage of the first of them; the plan's notes say so.
    Loads are those of ``step``, by default with one microbatch.

    Raises:
        ValueError: ``default`` or an entry of ``fixed`` is not a stage, or names an unknown module.
    """
    if not 0 <= default < stages:
        raise ValueError(f"default_partition must be from 0 to {stages - 1}, got {default}")
    placed = _inherit(trace, fixed, stages)
    homes = {name: placed.get(name, default) for name in trace.modules}
    notes = []
    for owners, tensors in _sharing(trace):
        if len({homes[owner] for owner in owners}) > 1:
            same = "; ".join(f"{', '.join(names)} are one tensor" for names in tensors)
            notes.append(f"{same}, so their modules all go to stage {homes[owners[0]]}")
        for owner in owners:
            homes[owner] = homes[owners[0]]
    return _plan(trace, stages, _with_aliases(trace, homes), step or StepShape.of(stages), notes=tuple(notes))


def _plan(
    trace: ModelTrace,
    stages: int,
    homes: dict[str, int],
    step: StepShape,
    *,
    notes: tuple[str, ...] = (),
    virtual_stages: int = 1,
) -> Plan:
    """Return the plan for these stages, with its predictions."""
    plan = Plan(
        stages=stages,
        homes=homes,
        shared=_shared(trace, homes),
        notes=notes,
        hooked=tuple(sorted(trace.hooked)),
        containers=_containers(trace),
        virtual_stages=virtual_stages,
    )
    return predict(with_opened(plan, trace), trace, step)


def _slightly_worse(rank: tuple[float, float]) -> tuple[float, float]:
    """Return what a later candidate must beat: a small gain in balance is not worth passing a stage twice."""
    return rank[0] * 0.985, rank[1]


def _inherit(trace: ModelTrace, fixed: Mapping[str, int], stages: int) -> dict[str, int]:
    """Return the fixed stage of every module that has one, of its own or from its nearest parent."""
    for name, stage in fixed.items():
        if name not in trace.modules and name not in trace.aliases:
            raise ValueError(f"a stage was given for {name!r}, which is not a module of this model")
        if not 0 <= stage < stages:
            raise ValueError(
                f"module {name!r} is to go to partition {stage}, but partitions go from 0 to {stages - 1}"
            )
    by_name = {trace.aliases.get(name, name): stage for name, stage in fixed.items()}
    placed: dict[str, int] = {}
    for name in trace.modules:
        holder = nearest(name, by_name)
        if holder is not None:
            placed[name] = by_name[holder]
    return placed


def _kept(
    trace: ModelTrace, saved: Mapping[str, int], by_hand: Mapping[str, int], stages: int
) -> dict[str, int]:
    """Return the modules of ``saved`` that can stay where they are, without those placed by hand."""
    by_name = {trace.aliases.get(name, name): stage for name, stage in saved.items() if stage < stages}
    kept = {name: by_name[name] for name in trace.modules if name in by_name and name not in by_hand}
    for owners, _ in _sharing(trace):
        if len({kept.get(owner) for owner in owners}) > 1:
            kept = {name: stage for name, stage in kept.items() if name not in owners}
    return kept


def _sharing(trace: ModelTrace) -> list[tuple[list[str], list[tuple[str, ...]]]]:
    """Return modules that must stay together because they share parameters, perhaps indirectly, and these."""
    groups: list[tuple[list[str], list[tuple[str, ...]]]] = []
    for names in trace.shared:
        owners, tensors = [trace.owner(name) for name in names], [names]
        for other in [shared for shared in groups if not set(owners).isdisjoint(shared[0])]:
            groups.remove(other)
            owners, tensors = other[0] + owners, other[1] + tensors
        groups.append((owners, tensors))
    return groups


def _homes(
    trace: ModelTrace, stage_of: Mapping[int, int], by_hand: Mapping[str, int], kept: Mapping[str, int]
) -> dict[str, int]:
    """Return the stage of every module name: its given one, or that of its unit."""
    sharing = {trace.owner(name) for names in trace.shared for name in names}
    settled = {name: stage for name, stage in by_hand.items() if name not in sharing} | dict(kept)
    homes = {name: settled.get(name, stage_of[unit]) for name, unit in trace.anchors.items()}
    return _with_aliases(trace, homes)


def _with_aliases(trace: ModelTrace, homes: dict[str, int]) -> dict[str, int]:
    """Add the further names of modules; what is everywhere is where the module around it is."""
    for alias, name in trace.aliases.items():  # outer ones first
        homes[alias] = homes[alias.rpartition(".")[0] if trace.modules[name].everywhere else name]
    return homes


def _containers(trace: ModelTrace) -> tuple[str, ...]:
    names = [*trace.modules, *trace.aliases]
    return tuple(name for name in names if trace.modules[trace.aliases.get(name, name)].container)


def _shared(trace: ModelTrace, homes: Mapping[str, int]) -> tuple[SharedParameter, ...]:
    return tuple(
        SharedParameter(names=names, home=homes[names[0].rpartition(".")[0]]) for names in trace.shared
    )

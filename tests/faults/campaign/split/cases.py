"""What happens in a case of split training: drawn from a seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

__all__ = ["FAULTS", "IN_A_STEP", "STEPS", "SplitCase", "draw"]

STEPS = 9
LAYOUTS = ("stages", "stages", "sharded", "tensor-parallel")
FAULTS = ("kill", "stop", "exit", "exception", "absent", "full disk", "pause", "late", "none")
HARMLESS = ("pause", "late", "none")
SILENT = ("stop", "absent")
IN_A_STEP = ("forward", "before backward", "after backward")
ANYWHERE = (*IN_A_STEP, "between steps", "save")


@dataclass(frozen=True)
class SplitCase:
    """One fault in a training.

    Attributes:
        trial: its number in the campaign, which also seeds model and data.
        ranks: of the job.
        partitions: of the model; if fewer than ranks, there are replicas.
        victim: the rank that misbehaves.
        fault: what it does.
        moment: where it does that: in the step function ("forward", "before backward", "after backward"),
            "between steps", in "save", or "anytime", struck from outside.
        step: in which it does.
        microbatch: at which call of the step function.
        delay: seconds until a blow from outside, or, in "save", from a thread.
        microbatches: of a batch.
        pipeline: the schedule.
        automatic: whether the library chooses the places, which costs a dry run.
        partial: the kind of checkpoint.
        layout: what ranks share: only "stages" of the model, parameters between all of them ("sharded"),
            or the tensors of each stage ("tensor-parallel").
        beside: threads save while training goes on.
        timeout: of all groups, in seconds.
        tidy: whether the ranks' interpreters end as a script's does.
    """

    trial: int
    ranks: int
    partitions: int
    victim: int
    fault: str
    moment: str
    step: int
    microbatch: int
    delay: float
    microbatches: int
    pipeline: str
    automatic: bool
    partial: bool
    timeout: float
    tidy: bool
    layout: str
    beside: bool

    @property
    def replicas(self) -> int:
        """How many train on rows of their own."""
        return self.ranks // (self.partitions * self.sharing)

    @property
    def sharing(self) -> int:
        """How many ranks have slices of the same tensors and train on the same rows."""
        return self.ranks // self.partitions if self.layout == "tensor-parallel" else 1

    @property
    def ends_the_training(self) -> bool:
        """Whether every other rank must get an error that it cannot go on from."""
        return self.fault not in (*HARMLESS, "full disk")

    @property
    def expires(self) -> bool:
        """Whether the others learn of the fault only when their patience ends."""
        return self.fault in SILENT

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        return step % 3 == 2 or (self.moment == "save" and step == self.step)


def draw(seed: int, trial: int, ranks: list[int], timeout: float) -> SplitCase:
    """Case ``trial`` of the campaign ``seed``; the same for every backend."""
    chance = random.Random(seed * 1_000_003 + trial)
    size = chance.choice(ranks)
    fault = FAULTS[trial % len(FAULTS)]
    moment = chance.choice(ANYWHERE)
    if fault in ("kill", "stop") and chance.random() < 0.4:
        moment = "anytime"
    if fault == "pause":
        moment = "anytime"
    if fault == "full disk":
        moment = "save"
    if fault == "exception" and moment == "save":
        moment = "between steps"
    microbatches = chance.choice([2, 2, 4])
    split = SplitCase(
        trial=trial,
        ranks=size,
        partitions=2 if size == 4 and chance.random() < 0.5 else size,
        victim=chance.randrange(size),
        fault=fault,
        moment=moment,
        step=chance.randrange(STEPS - 1),
        microbatch=chance.randrange(microbatches),
        delay=chance.choice([0.0, 0.05, 0.3, 0.8]) * chance.random(),
        microbatches=microbatches,
        pipeline=chance.choice(["simple", "interleaved"]),
        automatic=chance.random() < 0.4,
        partial=chance.random() < 0.6,
        timeout=timeout,
        tidy=chance.random() < 0.2,
        layout="stages",
        beside=False,
    )
    layout = chance.choice(LAYOUTS)
    two_stages = layout == "tensor-parallel" and size == 4 and chance.random() < 0.5
    partitions = split.partitions if layout == "stages" else 2 if two_stages else 1
    # What a full disk refuses is the call's own error only where the call writes.
    beside = fault != "full disk" and chance.random() < 0.4
    return replace(split, layout=layout, partitions=partitions, beside=beside)

"""What a model knows of the step that runs."""

from __future__ import annotations

from opensmd.modelparallel.replicas.backward_count import Backwards

__all__ = ["StepUnderWay"]


class StepUnderWay:
    """One step.

    Args:
        microbatches: of the step.

    Attributes:
        current: the microbatch that runs; of one partition alone, where they run one by one.
        in_backward: a backward of it runs.
        backwards: counts them.
    """

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.current = 0
        self.in_backward = False
        self.backwards = Backwards(microbatches)

"""Adding a rank's steps, and what the plan expects of them, to the job's timeline."""

from __future__ import annotations

from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.predict import comes_back
from opensmd.modelparallel.planning.simulate import parts_of_step
from opensmd.modelparallel.runtime.turns.record import Record
from opensmd.timeline.frames import NOTHING_EXPECTED
from opensmd.timeline.recorder import Recorder

__all__ = ["StepTimeline"]

_KINDS = {"F": "forward", "B": "backward", "W": "weights"}


class StepTimeline:
    """The steps of one rank in the timeline.

    Args:
        recorder: this process's; None if nothing is recorded.
        plan: what is expected.
        stage: this rank's position in the pipeline.
    """

    def __init__(self, recorder: Recorder | None, plan: Plan, stage: int) -> None:
        self._recorder = recorder
        self._plan = plan
        self._stage = stage
        # By a step's number of microbatches, the timeline's name of this rank's expected part.
        self._expected: dict[int, int] = {}

    def add(self, record: Record, microbatches: int) -> None:
        """Add a step of so many microbatches, successful or not."""
        recorder = self._recorder
        if recorder is None or recorder.paused:
            return
        expected = self._expected.get(microbatches)
        if expected is None:
            expected = self._expected[microbatches] = self._add_expected(recorder, microbatches)
        recorder.add_step(record.ended, expected)

    def _add_expected(self, recorder: Recorder, microbatches: int) -> int:
        """Add what the plan expects of this rank in a step of so many microbatches."""
        plan = self._plan
        if not all(load.seconds for load in plan.loads):
            return NOTHING_EXPECTED
        return recorder.add_expected(
            (part.microbatch, _KINDS[part.kind], part.start, part.end)
            for part in parts_of_step(plan.loads, microbatches, in_a_v=comes_back(plan))
            if part.stage == self._stage
        )

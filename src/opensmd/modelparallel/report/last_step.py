"""What there is to see of this job's own pipeline: its plan, and what every rank did in the last step."""

from __future__ import annotations

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.report.events import PipelineEvent, gather_events
from opensmd.modelparallel.runtime.engine import Engine
from opensmd.modelparallel.state import state
from opensmd.modelparallel.world import get_mp_process_group

__all__ = ["current_plan", "pipeline_events"]


def current_plan() -> Plan:
    """The plan by which this job's model is split: the stage of every module, their loads, what crosses.

    Raises:
        SMPNotInitializedError: ``smp.init`` has not been called.
        SMPError: no step has run yet, so that nothing has been split.
    """
    return _engine("opensmd.current_plan").plan


def pipeline_events() -> list[PipelineEvent]:
    """What every rank of this pipeline did when in the last step, on one clock.

    Collective: all ranks of the pipeline group call it, and all get the events of all.

    Raises:
        SMPNotInitializedError: ``smp.init`` has not been called.
        SMPError: no step has run yet.
    """
    engine = _engine("opensmd.pipeline_events")
    return gather_events(engine.record, get_mp_process_group(), sent=engine.sent)


def _engine(asked: str) -> Engine:
    engine = state.require(asked).engine
    if engine is None:
        raise SMPError(f"{asked}: the model is split in the first step, and none has run yet")
    return engine

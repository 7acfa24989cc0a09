"""A look at this job's own pipeline: its plan, and what every rank did in the last step."""

from __future__ import annotations

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.report.events import PipelineEvent, gather_events
from opensmd.modelparallel.runtime.engine import Engine
from opensmd.modelparallel.state import state
from opensmd.modelparallel.world import get_mp_process_group

__all__ = ["current_plan", "pipeline_events"]


def current_plan() -> Plan:
    """Return the plan by which this job's model is split: stages of modules, their loads, and what crosses.

    Raises:
        SMPNotInitializedError: ``smp.init`` has not been called.
        SMPError: no step has run yet, so nothing has been split.
    """
    return _engine("opensmd.current_plan").plan


def pipeline_events() -> list[PipelineEvent]:
    """Return what every rank of this pipeline did in the last step, on one clock.

    All ranks of the pipeline group must call; each gets the events of all.

    Raises:
        SMPNotInitializedError: ``smp.init`` has not been called.
        SMPError: no step has run yet.
    """
    engine = _engine("opensmd.pipeline_events")
    return gather_events(engine.record, get_mp_process_group(), sent=engine.sent)


def _engine(call: str) -> Engine:
    engine = state.require(call).engine
    if engine is None:
        raise SMPError(f"{call}: the model is split in the first step, and none has run yet")
    return engine

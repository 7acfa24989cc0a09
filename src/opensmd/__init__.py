"""OpenSMD: data and model parallelism for PyTorch, on any machine.

The import paths that scripts use (``smdistributed``, ``torch.distributed.deprecated``) are aliases for what
is in this package; all logic lives here, with a folder for each concept. The names below are this package's
own interface: they show plans, steps and ranks that hang, and give its settings. ``import torch`` imports
this file, so they are loaded only when first used.

Begin with ``collectives`` (process groups), ``modelparallel`` (split models) or ``launch`` (``smdrun``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opensmd.collectives.direct import direct
    from opensmd.collectives.flight import GroupEvent, group_events, write_group_trace
    from opensmd.collectives.gradients.compression import CompressionState, compression_hook
    from opensmd.collectives.stall import stall_report
    from opensmd.environment.settings import Settings
    from opensmd.modelparallel.dry_run.capture import capture
    from opensmd.modelparallel.planning.partition import partition
    from opensmd.modelparallel.planning.plan import Plan
    from opensmd.modelparallel.planning.trace import ModelTrace
    from opensmd.modelparallel.report.chart import draw_chart
    from opensmd.modelparallel.report.events import PipelineEvent, busy_share
    from opensmd.modelparallel.report.last_step import current_plan, pipeline_events
    from opensmd.modelparallel.report.table import plan_table
    from opensmd.modelparallel.report.timeline import write_pipeline_trace

__version__ = "0.2.0"

__all__ = [
    # what a model needs and where its modules go
    "capture",
    "ModelTrace",
    "partition",
    "Plan",
    "plan_table",
    "current_plan",
    # what the ranks of a pipeline did in the last step
    "pipeline_events",
    "PipelineEvent",
    "busy_share",
    "draw_chart",
    "write_pipeline_trace",
    # what the ranks of a group did last and who waits for whom
    "group_events",
    "GroupEvent",
    "write_group_trace",
    "stall_report",
    # faster collectives for small messages
    "direct",
    # how gradients travel between hosts
    "CompressionState",
    "compression_hook",
    # what the environment says
    "Settings",
]

_REPORT = "opensmd.modelparallel.report"
_FOUND_IN = {
    "capture": "opensmd.modelparallel.dry_run.capture",
    "ModelTrace": "opensmd.modelparallel.planning.trace",
    "partition": "opensmd.modelparallel.planning.partition",
    "Plan": "opensmd.modelparallel.planning.plan",
    "plan_table": f"{_REPORT}.table",
    "current_plan": f"{_REPORT}.last_step",
    "pipeline_events": f"{_REPORT}.last_step",
    "PipelineEvent": f"{_REPORT}.events",
    "busy_share": f"{_REPORT}.events",
    "draw_chart": f"{_REPORT}.chart",
    "write_pipeline_trace": f"{_REPORT}.timeline",
    "CompressionState": "opensmd.collectives.gradients.compression",
    "compression_hook": "opensmd.collectives.gradients.compression",
    "direct": "opensmd.collectives.direct",
    "group_events": "opensmd.collectives.flight",
    "GroupEvent": "opensmd.collectives.flight",
    "write_group_trace": "opensmd.collectives.flight",
    "stall_report": "opensmd.collectives.stall",
    "Settings": "opensmd.environment.settings",
}


def __getattr__(name: str) -> Any:
    """Load a name of the interface from its module."""
    if name not in _FOUND_IN:
        raise AttributeError(f"module 'opensmd' has no attribute {name!r}")
    value = getattr(importlib.import_module(_FOUND_IN[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the interface along with what is already loaded."""
    return sorted({*globals(), *__all__})

"""What a user sees of a pipeline: the plan's table, the chart of a run, and its Chrome trace.

Begin with ``events``; ``last_step`` asks the job's own engine for them. Imports ``planning``, ``ranks``
and, only for the last step, the ``runtime``.
"""

from opensmd.modelparallel.report.chart import draw_chart
from opensmd.modelparallel.report.events import PipelineEvent, busy_share, gather_events
from opensmd.modelparallel.report.table import plan_table, print_plan
from opensmd.modelparallel.report.timeline import write_pipeline_trace

__all__ = [
    "PipelineEvent",
    "busy_share",
    "draw_chart",
    "gather_events",
    "plan_table",
    "print_plan",
    "write_pipeline_trace",
]

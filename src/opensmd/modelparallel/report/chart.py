"""The pipeline's events as a picture: one row per rank, microbatches as coloured blocks, waiting in grey.

Small triangles at the edge of a row mark tensors leaving the rank, and point towards their destination.

With a plan there are two charts on one time axis: what the plan expected above what happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.report.events import PipelineEvent, busy_share
from opensmd.modelparallel.report.expected import expected_events

__all__ = ["draw_chart"]

READABLE = 0.012  # of the whole width; a narrower block has no room for its number
COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "weights": "#eeca3b", "wait": "#dddddd"}
SENDS = "sends"
WORDS = {
    "forward": "forward (F)",
    "backward": "backward (B)",
    "weights": "weight gradients (W)",
    "wait": "waiting",
}


def draw_chart(
    events: Sequence[PipelineEvent], path: str | Path, *, title: str = "", plan: Plan | None = None
) -> None:
    """Draw ``events`` into the image ``path`` (PNG, or whatever its suffix asks for).

    Args:
        title: at the top.
        plan: what it expected is drawn above, scaled to the same work (``opensmd.current_plan()``).

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no events.
    """
    if not events:
        raise ValueError(
            "there are no pipeline events to draw; run a step with more than one partition first"
        )
    expected = [] if plan is None else expected_events(plan, events)
    charts = [(f"{title}: expected by the plan".lstrip(": "), expected)] if expected else []
    charts.append((f"{title}: as it was".lstrip(": ") if expected else title, list(events)))
    ranks = len({event.rank for event in events})
    figure = _figure_class()(figsize=(12, len(charts) * (1.0 + 0.7 * ranks) + 0.2), layout="constrained")
    all_axes = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
    start = min(event.start_ns for event in events)
    width = max(event.end_ns for _, drawn in charts for event in drawn) - start
    for axes, (heading, drawn) in zip(all_axes, charts, strict=True):
        _draw(axes, drawn, start, width)
        axes.set_title(heading)
    all_axes[-1].set_xlabel("milliseconds")
    _legend(all_axes[-1])
    figure.savefig(path, dpi=120)


def _draw(axes: Any, events: Sequence[PipelineEvent], start: int, span: int) -> None:
    """Draw one chart, with a row per rank."""
    ranks = sorted({event.rank for event in events})
    readable = READABLE * span / 1e6
    _draw_sends(axes, [event for event in events if event.kind == "send"], ranks, start)
    stretches = [event for event in events if event.kind != "send"]
    for event in sorted(stretches, key=lambda event: event.kind != "wait"):
        left, width = (event.start_ns - start) / 1e6, (event.end_ns - event.start_ns) / 1e6
        axes.barh(
            ranks.index(event.rank),
            width,
            left=left,
            height=0.8,
            color=COLOURS[event.kind],
            edgecolor="white",
            linewidth=0.4,
        )
        if event.kind != "wait" and event.microbatch >= 0 and width >= readable:
            axes.text(
                left + width / 2,
                ranks.index(event.rank),
                str(event.microbatch),
                ha="center",
                va="center",
                fontsize=7,
                clip_on=True,
            )
    busy = busy_share(events)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}\n{busy[rank]:.0%} busy" for rank in ranks])
    axes.invert_yaxis()


def _draw_sends(axes: Any, sends: Sequence[PipelineEvent], ranks: Sequence[int], start: int) -> None:
    for marker, edge, down in ((7, 0.42, True), (6, -0.42, False)):  # triangles, by their anchor point
        drawn = [event for event in sends if (event.target > event.rank) is down]
        axes.scatter(
            [(event.start_ns - start) / 1e6 for event in drawn],
            [ranks.index(event.rank) + edge for event in drawn],
            marker=marker,
            s=14,
            color="black",
            linewidths=0,
            zorder=3,
        )


def _legend(axes: Any) -> None:
    for kind, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=WORDS[kind])
    axes.scatter([], [], marker=7, s=14, color="black", label=SENDS)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=len(COLOURS) + 1, frameon=False)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the pipeline chart needs matplotlib, which is not installed; install it with "
            "`pip install 'opensmd[plot]'`, or write a Chrome trace instead (write_pipeline_trace)"
        ) from error
    return Figure

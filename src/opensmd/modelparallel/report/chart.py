"""The pipeline's events as a picture: one row a rank, microbatches as coloured blocks, waiting in grey."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opensmd.modelparallel.report.events import PipelineEvent, busy_share

__all__ = ["draw_chart"]

READABLE = 0.012  # of the whole width; a block narrower than that has no room for its number
COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "weights": "#eeca3b", "wait": "#dddddd"}


def draw_chart(events: Sequence[PipelineEvent], path: str | Path, *, title: str = "") -> None:
    """Draw ``events`` into the image ``path`` (PNG, or whatever its suffix asks for).

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no events.
    """
    if not events:
        raise ValueError(
            "there are no pipeline events to draw; run a step with more than one partition first"
        )
    figure_class = _figure_class()
    ranks = sorted({event.rank for event in events})
    start = min(event.start_ns for event in events)
    readable = READABLE * (max(event.end_ns for event in events) - start) / 1e6
    figure = figure_class(figsize=(12, 1.2 + 0.7 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for event in sorted(events, key=lambda event: event.kind != "wait"):
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
    axes.set_xlabel("milliseconds")
    axes.set_title(title)
    _legend(axes)
    figure.savefig(path, dpi=120)


def _legend(axes: Any) -> None:
    for kind, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=len(COLOURS), frameon=False)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the pipeline chart needs matplotlib, which is not installed; install it with "
            "`pip install 'opensmd[plot]'`, or write a Chrome trace instead (write_pipeline_trace)"
        ) from error
    return Figure

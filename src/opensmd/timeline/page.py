"""The timeline as a self-contained HTML page: a table of shares and a chart to pan and zoom."""

from __future__ import annotations

import html
import json
from pathlib import Path

from opensmd.timeline.files import Timeline
from opensmd.timeline.shares import last_entries, shares, waits_until
from opensmd.timeline.span import COLLECTIVES, EXPECTED, MESSAGES, PIPELINE, Span

__all__ = ["WRITER", "write_page"]

WRITER = '<meta name="generator" content="opensmd">'  # near the beginning of the template

ROWS = (PIPELINE, COLLECTIVES, MESSAGES, EXPECTED)
TEMPLATE = Path(__file__).with_name("page.html")


def write_page(timeline: Timeline, path: Path) -> None:
    """Write the page."""
    last = last_entries(timeline)
    rows = {rank: [_row(span, last) for span in spans] for rank, spans in timeline.items()}
    # "</" could end the script that contains the data
    data = json.dumps({"ranks": rows, "end": timeline.end_ns}, separators=(",", ":")).replace("</", "<\\/")
    text = TEMPLATE.read_text(encoding="utf-8")
    path.write_text(text.replace("@TABLE@", _table(timeline)).replace("@DATA@", data), encoding="utf-8")


def _row(span: Span, last: dict[str, tuple[int, int]]) -> list[str | int]:
    """Return row, name, start, end, microbatch, end of waiting and whom it waited for, bytes."""
    until, who = (waits_until(span, last), last[span.call][1]) if span.call else (span.start_ns, -1)
    return [
        ROWS.index(span.track),
        span.name,
        span.start_ns,
        span.end_ns,
        span.microbatch,
        until,
        who,
        span.bytes,
    ]


def _table(timeline: Timeline) -> str:
    cells = []
    for rank, part in shares(timeline, timeline.end_ns).items():
        numbers = (part.busy, part.waiting, part.moving, part.bubble)
        cells.append(f"<tr><th>rank {rank}</th>" + "".join(f"<td>{n:.1%}</td>" for n in numbers) + "</tr>")
    note = f"Only the beginning of ranks {timeline.cut} was recorded." if timeline.cut else ""
    return "\n".join([*cells, f"<caption>{html.escape(note)}</caption>" if note else ""])

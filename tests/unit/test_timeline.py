"""The timeline: what ranks record, how it is read onto one clock, and what trace and page show of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from opensmd.timeline.files import Timeline, read_timeline
from opensmd.timeline.page import write_page
from opensmd.timeline.recorder import VARIABLE, Recorder, recorder
from opensmd.timeline.results import PAGE, TRACE, begin_timeline, write_results
from opensmd.timeline.shares import shares
from opensmd.timeline.span import COLLECTIVES, PIPELINE, Span


def collective(start: int, end: int, call: str = "world/0/1") -> Span:
    return Span(COLLECTIVES, "all_reduce", start, end, call=call, bytes=64)


def small_timeline() -> Timeline:
    return Timeline(
        {
            0: [Span(PIPELINE, "forward", 0, 40, 0), Span(PIPELINE, "wait", 40, 60), collective(60, 100)],
            1: [Span(PIPELINE, "wait", 0, 40), Span(PIPELINE, "forward", 40, 80, 0), collective(90, 100)],
        }
    )


def test_a_collective_waits_until_its_last_rank_has_entered() -> None:
    first, last = shares(small_timeline(), 100).values()
    assert (first.busy, first.waiting, first.moving, first.bubble) == pytest.approx((0.4, 0.3, 0.1, 0.2))
    assert (last.busy, last.waiting, last.moving, last.bubble) == pytest.approx((0.5, 0.0, 0.1, 0.4))


def test_a_collective_beside_computation_costs_nothing() -> None:
    spans = [Span(PIPELINE, "backward", 0, 100, 0), collective(20, 60)]
    assert shares({0: spans}, 100)[0].busy == pytest.approx(1.0)


def test_spans_that_overlap_are_counted_once() -> None:
    spans = [collective(0, 50, "a"), collective(20, 60, "b"), Span(PIPELINE, "wait", 40, 80)]
    found = shares({0: spans}, 100)[0]
    assert found.moving == pytest.approx(0.6)
    assert found.bubble == pytest.approx(0.2)


def test_without_the_variable_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.cache_clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    assert recorder(0) is None
    recorder.cache_clear()


def test_what_is_recorded_is_read_again_on_one_clock(tmp_path: Path) -> None:
    recorders = [Recorder(tmp_path, rank=rank) for rank in (0, 1)]
    begun = time.perf_counter_ns()
    new = [collective(begun, begun + 500)]
    recorders[0].add([Span(PIPELINE, "forward", begun + 1000, begun + 3000, 7)])
    recorders[1].add_source(lambda: [new.pop()] if new else [])
    for writer in recorders:
        writer.close()
        writer.close()
    found = read_timeline(tmp_path)
    assert found == {
        0: [Span(PIPELINE, "forward", 1000, 3000, 7)],
        1: [collective(0, 500)],
    }
    assert found.end_ns == 3000


def test_half_a_line_of_a_killed_rank_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank-0.tsv").write_text("0\thost\t5\npipeline\tforward\t1\t2\t0\t\t0\npipeline\tforw")
    assert len(read_timeline(tmp_path)[0]) == 1
    (tmp_path / "rank-1.tsv").write_text("something else\n")
    with pytest.raises(ValueError, match=r"rank-1\.tsv is not a rank's part of a timeline"):
        read_timeline(tmp_path)


def test_an_empty_folder_says_what_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rank has left events"):
        write_results(tmp_path)


def test_results_of_an_earlier_job_are_removed(tmp_path: Path) -> None:
    for name in ("rank-5.tsv", TRACE, PAGE, "mine.txt"):
        (tmp_path / name).write_text("old")
    assert begin_timeline(tmp_path) == tmp_path.resolve()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match=r"--timeline .* cannot be written to"):
        begin_timeline(tmp_path / "mine.txt")


def test_the_page_draws_every_span_and_stands_alone(tmp_path: Path) -> None:
    page = tmp_path / "timeline.html"
    timeline = small_timeline()
    timeline[1].append(Span(PIPELINE, "</script>", 99, 100))
    write_page(timeline, page)
    text = page.read_text()
    assert not re.search(r"(src|href)=|https?://", text), "the page loads something"
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    rows = json.loads(data[1])["ranks"]
    assert [len(rows[rank]) for rank in ("0", "1")] == [3, 4]
    assert "<th>rank 0</th><td>40.0%</td><td>30.0%</td><td>10.0%</td><td>20.0%</td>" in text


@pytest.mark.processes
def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on PATH")
    page = tmp_path / "timeline.html"
    write_page(small_timeline(), page)
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *quiet]
    command += [f"--user-data-dir={tmp_path}/profile", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    # six spans, and one part of waiting
    assert 'data-drawn="7"' in done.stdout, done.stderr

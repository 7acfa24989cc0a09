"""The page that shows a timeline."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from opensmd.timeline.page import write_page
from opensmd.timeline.span import EXPECTED, PIPELINE, Span
from tests.support.patience import PATIENCE
from tests.unit.timeline.small_timeline import small_timeline


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
    timeline = small_timeline()
    timeline[0].append(Span(EXPECTED, "forward", 0, 30, 0))
    timeline[1].append(Span(EXPECTED, "forward", 30, 60, 0))
    write_page(timeline, page)
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *quiet]
    command += [f"--user-data-dir={tmp_path}/profile", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    # eight spans, and one part of waiting
    assert 'data-drawn="9"' in done.stdout, done.stderr
    assert 'data-expected="2"' in done.stdout
    legend = done.stdout.partition('id="legend">')[2].partition("</div>")[0]
    for word in ("forward (F)", "backward (B)", "weight gradients (W)", "bubble", "sends and receives"):
        assert word in legend

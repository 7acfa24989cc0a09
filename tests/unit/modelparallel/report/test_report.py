"""A step as a chart, a trace and shares of time."""

from __future__ import annotations

import builtins
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import opensmd
import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.planning.plan import Plan, StageLoad
from opensmd.modelparallel.report import busy_share, draw_chart, gather_events, write_pipeline_trace
from opensmd.modelparallel.report.events import PipelineEvent
from opensmd.modelparallel.report.expected import expected_events
from tests.support.partitioned import restart
from tests.support.patience import PATIENCE
from tests.support.ranks import RankPool


def events() -> list[PipelineEvent]:
    milliseconds = [
        (0, 0, "forward", 0, 10), (0, 1, "forward", 10, 20), (0, -1, "wait", 20, 30),
        (0, 0, "backward", 30, 50), (1, -1, "wait", 0, 10), (1, 0, "forward", 10, 20),
        (1, 0, "backward", 20, 40),
    ]  # fmt: skip
    return [
        PipelineEvent(rank=rank, microbatch=microbatch, kind=kind, start_ns=a * 10**6, end_ns=b * 10**6)
        for rank, microbatch, kind, a, b in milliseconds
    ]


def test_busy_shares_count_work_and_not_waiting() -> None:
    assert busy_share(events()) == {0: pytest.approx(0.8), 1: pytest.approx(0.6)}
    assert busy_share([]) == {}


def test_the_chrome_trace_has_one_process_a_rank(tmp_path: Path) -> None:
    write_pipeline_trace(events(), tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {one["pid"] for one in trace} == {0, 1}
    backward = next(one for one in trace if one["name"] == "backward 0" and one["pid"] == 1)
    assert (backward["ts"], backward["dur"]) == (20e3, 20e3)


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    draw_chart(events(), tmp_path / "chart.png", title="two ranks")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no pipeline events"):
        draw_chart([], tmp_path / "empty.png")


def even_plan() -> Plan:
    loads = tuple(StageLoad(forward_seconds=1.0, backward_seconds=2.0, in_flight=held) for held in (2, 1))
    return Plan(stages=2, homes={"": 0}, loads=loads)


def test_what_a_plan_expects_has_the_work_of_what_was() -> None:
    """Two ranks work 70 ms in all."""
    expected = expected_events(even_plan(), events())
    rows = {
        rank: [(event.kind[0], event.microbatch) for event in expected if event.rank == rank]
        for rank in (0, 1)
    }
    assert rows[0] == [
        ("f", 0), ("f", 1), ("w", -1), ("b", 0), ("w", -1), ("b", 1),
    ]  # fmt: skip
    assert rows[1] == [("w", -1), ("f", 0), ("b", 0), ("f", 1), ("b", 1), ("w", -1)]
    worked = sum(event.end_ns - event.start_ns for event in expected if event.kind != "wait")
    assert worked == pytest.approx(70e6, rel=1e-6)
    nothing_known = replace(even_plan(), loads=(StageLoad(), StageLoad()))
    assert expected_events(nothing_known, events()) == []


def test_the_chart_of_a_plan_is_above_and_all_kinds_are_in_the_legend(tmp_path: Path) -> None:
    """Texts of an SVG are comments beside their outlines."""
    draw_chart(events(), tmp_path / "chart.svg", title="one step", plan=even_plan())
    texts = re.findall(r"<!-- (.*?) -->", (tmp_path / "chart.svg").read_text())
    assert texts.index("one step: expected by the plan") < texts.index("one step: as it was")
    for word in ("forward (F)", "backward (B)", "weight gradients (W)", "waiting", "sends"):
        assert texts.count(word) == 1
    draw_chart(events(), tmp_path / "alone.svg", title="one step")
    assert "expected" not in (tmp_path / "alone.svg").read_text()


def triangles(path: Path) -> int:
    """How many markers a chart has, that of the legend included."""
    return len(re.findall(r"<use ", path.read_text()))


def test_what_is_sent_is_a_triangle_and_no_work(tmp_path: Path) -> None:
    draw_chart(events(), tmp_path / "without.svg")
    sends = [
        PipelineEvent(rank=0, microbatch=0, kind="send", start_ns=10**7, end_ns=10**7, target=1),
        PipelineEvent(rank=1, microbatch=0, kind="send", start_ns=3 * 10**7, end_ns=3 * 10**7, target=0),
    ]
    draw_chart([*events(), *sends], tmp_path / "with.svg", plan=even_plan())
    draw_chart([*events(), *sends], tmp_path / "alone.svg")
    assert triangles(tmp_path / "alone.svg") == triangles(tmp_path / "without.svg") + 2
    assert busy_share([*events(), *sends]) == busy_share(events())
    write_pipeline_trace([*events(), *sends], tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [one["args"] for one in trace if one.get("cat") == "send"] == [
        {"microbatch": 0, "to": 1},
        {"microbatch": 0, "to": 0},
    ]


def test_blocks_without_room_have_no_label(tmp_path: Path) -> None:
    thin = PipelineEvent(rank=1, microbatch=7, kind="forward", start_ns=41 * 10**6, end_ns=41 * 10**6 + 1000)
    draw_chart([*events(), thin], tmp_path / "chart.svg")
    texts = re.findall(r"<!-- (.*?) -->", (tmp_path / "chart.svg").read_text())
    assert "7" not in texts and "1" in texts


def test_without_matplotlib_the_chart_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'opensmd\[plot\]'"):
        draw_chart(events(), tmp_path / "chart.png")


def gathered() -> list[PipelineEvent]:
    now = time.perf_counter_ns()
    rank = dist.get_rank()
    mine = PipelineEvent(rank=9, microbatch=rank, kind="forward", start_ns=now, end_ns=now + 10 + rank)
    return gather_events([mine])


@pytest.mark.processes
def test_events_of_all_ranks_come_together_on_one_clock(pool: Callable[[int], RankPool]) -> None:
    before = time.time_ns()
    found = pool(2).run(gathered, backend="gloo")
    assert found[0] == found[1]
    assert [(event.rank, event.microbatch, event.end_ns - event.start_ns) for event in found[0]] == [
        (0, 0, 10),
        (1, 1, 11),
    ]
    assert all(abs(event.start_ns - before) < PATIENCE * 10**9 for event in found[0])


def sends_of_a_step() -> list[tuple[int, int, int]]:
    restart(partitions=2, microbatches=2, auto_partition=False, default_partition=0)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(model(x).sum())

    for _ in range(2):
        step(torch.ones(4, 2))
    events = opensmd.pipeline_events()
    return sorted((event.rank, event.target, event.microbatch) for event in events if event.kind == "send")


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["smddp", "gloo"])
def test_tensors_and_gradients_of_the_last_step_alone_are_sends(
    pool: Callable[[int], RankPool], backend: str
) -> None:
    found = pool(2).run(sends_of_a_step, backend=backend)
    assert found[0] == found[1]
    assert set(found[0]) == {(0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)}
    if backend == "smddp":  # over gloo a gradient follows the word that there is one
        assert len(found[0]) == 4

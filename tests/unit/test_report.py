"""What users see: tables, charts, traces and ``smd plan``."""

from __future__ import annotations

import builtins
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.planning.partition import partition
from opensmd.modelparallel.planning.plan import Plan, StageLoad
from opensmd.modelparallel.planning.predict import bubble
from opensmd.modelparallel.report import busy_share, draw_chart, gather_events, print_plan, write_chrome_trace
from opensmd.modelparallel.report.events import PipelineEvent
from opensmd.tools.plan import plan as plan_command
from tests.support.ranks import RankPool

HERE = "tests.unit.test_report"


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU())


def model_alone() -> nn.Module:
    return nn.Sequential(*[block() for _ in range(4)])


def model_and_inputs() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return model_alone(), (torch.ones(8, 64),)


def model_and_step() -> tuple[nn.Module, Any]:
    model = model_alone()
    return model, lambda: model(torch.ones(8, 64)).sum()


def nonsense() -> int:
    return 3


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


def make_plan(stages: int = 2) -> Plan:
    return partition(capture(*model_and_step()), stages, memory_weight=0.0, microbatches=4)


def test_the_log_begins_with_the_originals_line_and_names_every_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="opensmd.modelparallel"):
        print_plan(make_plan())
    message = caplog.records[0].getMessage()
    assert message.startswith("Partition assignments:\n")
    for word in ("0", "3", "parameters", "activations", "peak memory", "0 -> 1: 1 tensor, 2.0 KiB"):
        assert word in message


def test_the_rows_of_a_plan_add_up_to_the_model() -> None:
    plan = make_plan(4)
    assert sum(row.parameters for row in plan.rows) == 4 * (64 * 64 + 64)
    assert sum(row.seconds for row in plan.rows) == pytest.approx(sum(load.seconds for load in plan.loads))
    assert [row.module for row in plan.rows] == ["0", "1", "2", "3"]
    assert [row.crossing_bytes for row in plan.rows] == [2048, 2048, 2048, 0]


def test_the_predicted_bubble_of_even_stages_is_the_textbooks() -> None:
    loads = tuple(
        StageLoad(forward_seconds=1.0, backward_seconds=2.0, in_flight=most) for most in (4, 4, 3, 1)
    )
    assert bubble(Plan(stages=4, homes={"": 0}, loads=loads), 4) == pytest.approx(3 / 7)
    assert bubble(Plan(stages=4, homes={"": 0}), 4) == pytest.approx(3 / 7)  # nothing known: assume even
    assert bubble(make_plan(1), 4) == pytest.approx(0)
    uneven = (loads[0], StageLoad(forward_seconds=3.0, backward_seconds=6.0))
    # the slow stage works all the time but the first: 8 microbatches of 9 and 3 before them
    assert bubble(Plan(stages=2, homes={"": 0}, loads=uneven), 8) == pytest.approx(1 - 8 * 12 / (2 * 75))
    assert bubble(Plan(stages=2, homes={"": 0}, loads=uneven), 800) == pytest.approx(
        1 - 800 * 12 / (2 * 7203)
    )


def test_gradients_of_weights_that_are_computed_late_fill_some_of_the_bubble() -> None:
    def even(stages: int, late: int) -> Plan:
        return Plan(
            stages=stages,
            homes={"": 0},
            loads=tuple(
                StageLoad(
                    forward_seconds=1.0,
                    backward_seconds=2.0,
                    late_seconds=1.0,
                    in_flight=1 if stage == stages - 1 else stages - stage + 1,
                    late=late if stage else 0,
                )
                for stage in range(stages)
            ),
        )

    # as in the paper on zero-bubble schedules: of a wait of 1 + 2 seconds 1 + 1 - 1 are left
    assert bubble(even(2, 2), 8) == pytest.approx(1 - 8 * 3 / (8 * 3 + 1))
    for stages in (2, 3, 4):
        textbook = (stages - 1) / (8 + stages - 1)
        assert bubble(even(stages, 0), 8) == pytest.approx(textbook)
        assert bubble(even(stages, 2), 8) < bubble(even(stages, 1), 8) < textbook


def test_the_peak_counts_what_late_gradients_keep() -> None:
    load = StageLoad(
        training_bytes=1000, activation_bytes=100, late_input_bytes=40, late_gradient_bytes=30, in_flight=1
    )
    assert (load.memory_bytes, load.waiting_bytes) == (1100, 0)
    # in the last backward: what the one before keeps, all of its own, and its own gradients
    late = replace(load, late=2)
    assert (late.memory_bytes, late.waiting_bytes) == (1000 + 70 + 100 + 30, 140)
    assert replace(late, in_flight=4).memory_bytes == 1400  # while four forwards wait, none is late yet


def test_busy_shares_count_work_and_not_waiting() -> None:
    assert busy_share(events()) == {0: pytest.approx(0.8), 1: pytest.approx(0.6)}
    assert busy_share([]) == {}


def test_the_chrome_trace_has_one_process_a_rank(tmp_path: Path) -> None:
    write_chrome_trace(events(), tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {each["pid"] for each in trace} == {0, 1}
    backward = next(each for each in trace if each["name"] == "backward 0" and each["pid"] == 1)
    assert (backward["ts"], backward["dur"]) == (20e3, 20e3)


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    draw_chart(events(), tmp_path / "chart.png", title="two ranks")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no pipeline events"):
        draw_chart([], tmp_path / "empty.png")


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


@pytest.mark.parametrize("factory", ["model_alone", "model_and_inputs", "model_and_step"])
def test_smd_plan_shows_plan_memory_and_bubble(factory: str) -> None:
    arguments = [f"{HERE}:{factory}", "--partitions", "4", "--microbatches", "8"]
    result = CliRunner().invoke(plan_command, arguments)
    assert result.exit_code == 0, result.output
    for word in ("Modules in the order of execution", "peak memory", "predicted bubble with 8 microbatches"):
        assert word in result.output


def test_smd_plan_says_when_partitions_stay_empty() -> None:
    result = CliRunner().invoke(plan_command, [f"{HERE}:model_alone", "--partitions", "60"])
    assert result.exit_code == 0, result.output
    assert "nothing of the model lives on partition" in result.stderr
    assert "predicted bubble with 1 microbatch:" in result.output


def test_smd_plan_writes_json_that_is_a_plan() -> None:
    result = CliRunner().invoke(plan_command, [f"{HERE}:model_and_step", "--json"])
    assert Plan.from_json(result.output).stages == 2


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "module:factory"),
        ("no_such_module:f", "no_such_module"),
        (f"{HERE}:nonsense", "returned int"),
    ],
)
def test_smd_plan_explains_what_it_cannot_use(target: str, message: str) -> None:
    result = CliRunner().invoke(plan_command, [target])
    assert result.exit_code != 0
    assert message in result.output


def gathered() -> list[PipelineEvent]:
    now = time.perf_counter_ns()
    rank = dist.get_rank()
    mine = PipelineEvent(rank=9, microbatch=rank, kind="forward", start_ns=now, end_ns=now + 10 + rank)
    return gather_events([mine])


@pytest.mark.processes
def test_events_of_all_ranks_come_together_on_one_clock(pool: Callable[[int], RankPool]) -> None:
    before = time.time_ns()
    found = pool(2).run(gathered, backend="gloo")
    after = time.time_ns()
    assert found[0] == found[1]
    assert [(event.rank, event.microbatch, event.end_ns - event.start_ns) for event in found[0]] == [
        (0, 0, 10),
        (1, 1, 11),
    ]
    assert all(before - 10**9 < event.start_ns < after + 10**9 for event in found[0])

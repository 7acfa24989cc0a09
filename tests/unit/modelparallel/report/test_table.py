"""The plan that the log shows."""

from __future__ import annotations

import logging

import pytest

from opensmd.modelparallel.report import print_plan, table
from tests.unit.modelparallel.small_plan import make_plan


def test_the_log_begins_with_the_originals_line_and_names_every_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="opensmd.modelparallel"):
        print_plan(make_plan())
    message = caplog.records[0].getMessage()
    assert message.startswith("Partition assignments:\n")
    for word in ("0", "3", "parameters", "activations", "peak memory", "0 -> 1: 1 tensor, 2.0 KiB"):
        assert word in message


def test_a_plan_that_nobody_logs_is_not_drawn(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "render", lambda _: pytest.fail("drawn"))
    with caplog.at_level(logging.WARNING, logger="opensmd.modelparallel"):
        print_plan(make_plan())
    assert not caplog.records


def test_the_rows_of_a_plan_add_up_to_the_model() -> None:
    plan = make_plan(4)
    assert sum(row.parameters for row in plan.rows) == 4 * (64 * 64 + 64)
    assert sum(row.seconds for row in plan.rows) == pytest.approx(sum(load.seconds for load in plan.loads))
    assert [row.module for row in plan.rows] == ["0", "1", "2", "3"]
    assert [row.crossing_bytes for row in plan.rows] == [2048, 2048, 2048, 0]

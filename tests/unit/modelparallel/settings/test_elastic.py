"""The setting ``elastic``: its values, and what it cannot be combined with."""

from __future__ import annotations

from typing import Any

import pytest

from opensmd.modelparallel.settings.elastic import HINDERS_REPLICAS
from opensmd.modelparallel.settings.sources import load_config

ASKS = {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}
ASKS |= {"auto": {"model": "models:build", "batch": 4}}


def load(elastic: Any, **more: Any) -> Any:
    return load_config({"partitions": 2, "ddp": True, "elastic": elastic, **more}, environ={}, arguments=[])


def test_true_takes_the_defaults_and_false_is_none() -> None:
    found = load(True).elastic
    assert (found.min_replicas, found.timeout) == (1, 300.0)
    assert load(False).elastic is None
    assert load({"min_replicas": 2, "timeout": 5}).elastic.timeout == 5.0


@pytest.mark.parametrize("wrong", [{"minimum": 1}, {"min_replicas": 0}, {"timeout": 0}, 3])
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="elastic"):
        load(wrong)


@pytest.mark.parametrize("name", HINDERS_REPLICAS)
def test_what_would_leave_state_behind_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        load(True, **{name: ASKS.get(name, True)})


def test_a_schedule_by_measured_times_and_a_job_without_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="elastic cannot be combined with pipeline='searched'"):
        load(True, pipeline="searched")
    with pytest.raises(ValueError, match="elastic needs ddp=True"):
        load(True, ddp=False)

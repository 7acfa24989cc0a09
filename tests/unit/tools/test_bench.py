"""``smd bench`` measures and checks every collective."""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from opensmd.tools import cli
from opensmd.tools.bench import COLLECTIVES
from opensmd.tools.bench_operations import OPERATIONS, Buffers
from opensmd.tools.bench_rank import Result
from opensmd.tools.bench_rank import as_lines as as_table
from tests.support.forked_jobs import run_job


@pytest.mark.processes
def test_bench_measures_and_checks_every_collective(tmp_path: Path) -> None:
    words = ["bench", "all", "-n", "3", "--bytes", "4,4096", "--seconds", "0.02", "--json"]
    command = [sys.executable, "-m", "opensmd.tools.cli", *words]
    done = run_job(command, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 3
    cases = [(row["collective"], row["bytes"], row["backend"]) for row in found["results"]]
    parts = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")  # a part for each rank
    for name in OPERATIONS:
        sizes = (12, 4104) if name in parts else (4, 4096)
        assert [case for case in cases if case[0] == name] == [*product([name], sizes, ("gloo", "smddp"))]
    assert "Warning" not in done.stderr
    for row in found["results"]:
        assert row["wrong"] == 0
        assert row["microseconds"] > 0 and row["bus_gb_per_s"] > 0


def test_wrong_elements_are_counted() -> None:
    buffers = Buffers(6, rank=1, size=2)
    for operation in OPERATIONS.values():
        buffers.reset()
        expected = operation.expected(buffers)
        if expected is not None:
            operation.result(buffers).copy_(expected)
            assert operation.wrong(buffers) == 0
            operation.result(buffers)[0] += 1
            assert operation.wrong(buffers) == 1


def test_bus_bandwidth_is_counted_as_nccl_tests_does() -> None:
    shares = {name: operation.share(4) for name, operation in OPERATIONS.items()}
    assert shares["all_reduce"] == 1.5
    for name in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"):
        assert shares[name] == 0.75
    for name in ("broadcast", "reduce", "send_recv"):
        assert shares[name] == 1


def test_the_benchs_table_has_a_line_a_case() -> None:
    rows = [Result("reduce", 4, "gloo", 30.0, 0.5, 0), Result("reduce", 4, "smddp", 10.0, 1.5, 2)]
    lines = as_table(rows)
    assert lines[1].split() == ["reduce", "4", "30.0", "0.500", "10.0", "1.500", "3.0x", "2"]
    assert {len(line) for line in lines} == {len(lines[0])}


def test_bench_knows_its_collectives_without_loading_torch() -> None:
    assert list(OPERATIONS) == list(COLLECTIVES)
    result = CliRunner().invoke(cli.main, ["bench", "gossip"])
    assert result.exit_code == 2
    assert "no collective 'gossip', only all_reduce, " in result.output

"""A short campaign of random faults in every run; ``python -m tests.faults.campaign`` runs a long one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.faults.campaign.cases import FAULTS
from tests.faults.campaign.oracle import blamed, blamed_on_hosts
from tests.faults.campaign.split import cases as split_cases
from tests.support.forks import ForkedProcess
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def run_campaign(arguments: list[str]) -> None:
    from tests.faults.campaign.__main__ import main

    sys.exit(main(arguments))


def require_promises_kept(tmp_path: Path, *options: str) -> None:
    report, output = tmp_path / "report.json", tmp_path / "output"
    arguments = [*options, "--report", str(report)]
    process = ForkedProcess(run_campaign, arguments, cwd=ROOT, env=dict(os.environ), stderr=output)
    code = process.wait(timeout=PATIENCE)
    assert report.exists(), output.read_text()
    found = json.loads(report.read_text())
    broken = [case for case in found["cases"] if case["findings"] or case["left"]]
    assert not broken, json.dumps(broken, indent=1)
    assert code == 0, output.read_text()


def test_random_faults_end_as_promised_on_every_rank(tmp_path: Path) -> None:
    """As many as there are kinds of faults: each comes once."""
    require_promises_kept(tmp_path, "--trials", str(len(FAULTS)), "--seed", "23")


def test_random_faults_in_split_training_end_as_promised_and_leave_a_checkpoint(tmp_path: Path) -> None:
    trials = str(len(split_cases.FAULTS) - 1)  # the last fault is none
    require_promises_kept(tmp_path, "--split", "--trials", trials, "--seed", "3", "--world", "2", "3")


def test_the_oracle_reads_who_is_held_responsible() -> None:
    assert blamed("all_reduce(...) #2 on rank 1: rank 3 has died (its process has died; ...)") == {3}
    late = "barrier() #9 on rank 0: Timed out after 3 ms; not arrived: rank 12 (its process is stopped; it is"
    assert blamed(f"{late} in barrier() #8); arrived but not finished: rank 1 (it is in barrier() #9)") == {
        12
    }
    assert blamed("recv(from rank 1, tag=0) on rank 2: rank 1 sent 4 bytes with tag 0") == {1}
    calls = "rank 0 and rank 2 called broadcast(root=rank 0) shape [1]; rank 5 called barrier()"
    assert blamed(f"different calls at sequence number 2: {calls}") == {0, 2, 5}
    assert blamed("abort() was called on rank 4") == {4}
    assert blamed("Connection closed by peer") == set()
    receive = "rank 2 on vm#2 in a receive from rank 1 on vm#1 (4 bytes of int32, tag 5)"
    assert blamed_on_hosts(f"{receive}: rank 1 on vm#1 sends 4 bytes of float32 instead") == {1}

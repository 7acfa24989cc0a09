"""The model-parallel examples run split over processes, with tiny settings and the user's own text.

One is started with ``smdrun``; ranks of the pool run the others.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.forked_jobs import run_job
from tests.support.ranks import ROOT, RankPool
from tests.support.scripts import run_script

EXAMPLES = ROOT / "examples" / "model_parallel"
SMDRUN = Path(sys.executable).with_name("smdrun")
Pools = Callable[[int], RankPool]
SMALL = ["--layers", 2, "--width", 32, "--batch-size", 8, "--microbatches", 2]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of one's own, easily learned."""
    path: Path = tmp_path_factory.mktemp("text") / "mine.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return path


def smdrun(script: str, text: Path, *options: object, ranks: int) -> str:
    """What the script printed, run by so many ranks."""
    command = [SMDRUN, "-n", ranks, EXAMPLES / script, "--data", text, *SMALL, *options]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_job(command, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def on_ranks(pool: RankPool, script: str, text: Path, *options: object) -> str:
    """What the script printed, run by ranks of the pool."""
    return run_script(pool, EXAMPLES / script, "--data", text, *SMALL, *options)


def losses(printed: str) -> list[float]:
    return [float(match) for match in re.findall(r"step \d+: loss ([\d.]+)", printed)]


def test_pipeline_prints_the_plan_draws_a_step_and_learns_like_one_process(
    text: Path, tmp_path: Path
) -> None:
    chart = tmp_path / "chart.png"
    printed = smdrun("pipeline.py", text, "--steps", 20, "--chart", chart, "--compare", ranks=2)
    assert "Partition assignments:" in printed and re.search(r"0 -> 1: \d+ tensors?", printed)
    assert "the 20 losses differ from those of one process by at most" in printed
    assert losses(printed)[1] < losses(printed)[0]
    assert re.search(r"busy in the last step: rank 0 \d+%, rank 1 \d+%", printed)
    assert chart.stat().st_size > 5000


def test_hybrid_learns_like_one_process(pool: Pools, text: Path) -> None:
    options = ["--steps", 10, "--placement", "spread", "--compare"]
    printed = on_ranks(pool(4), "hybrid.py", text, *options)
    assert "2 copies of 2 stages; ranks of the first: [0, 2]" in printed
    assert "the 10 losses differ from those of one process by at most" in printed


def test_modules_live_where_the_script_says(pool: Pools, text: Path) -> None:
    printed = on_ranks(pool(2), "manual.py", text, "--steps", 20)
    assert "process 0 has letters, first, head" in printed
    assert "process 1 has second" in printed
    assert losses(printed)[1] < losses(printed)[0]


def test_copies_that_may_come_and_go_train_on_when_nothing_lets_them(pool: Pools, text: Path) -> None:
    """Without ``--elastic-replicas``; a job with it is in tests/faults/test_elastic_replicas.py."""
    printed = on_ranks(pool(2), "elastic_replicas.py", text, "--steps", 20)
    assert "the setting elastic has no effect" in printed
    assert losses(printed)[1] < losses(printed)[0]
    assert len(re.findall("with copies: 1", printed)) == 20


def test_training_goes_on_with_another_number_of_processes(pool: Pools, text: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts" / "gpt.pt"
    straight_on = ["--steps", 10, "--checkpoint", tmp_path / "straight"]
    straight = on_ranks(pool(2), "resume.py", text, *straight_on)
    on_ranks(pool(2), "resume.py", text, "--steps", 5, "--checkpoint", parts)
    options = ["--checkpoint", parts, "--resume", "--export", whole]
    resumed = on_ranks(pool(1), "resume.py", text, "--steps", 10, *options)
    assert losses(resumed)[-1] == pytest.approx(losses(straight)[-1], abs=2e-4)
    exported = torch.load(whole)
    assert not [name for name in exported if name.startswith("_smp")]
    assert exported["head.weight"].shape[1] == 32


def test_a_hugging_face_model_learns_with_its_own_loss(pool: Pools, text: Path) -> None:
    printed = on_ranks(pool(2), "huggingface.py", text, "--steps", 20)
    assert losses(printed)[1] < losses(printed)[0]
    counts = re.search(r"parameters in each process: ([\d,]+), ([\d,]+)", printed)
    assert counts is not None
    assert all(int(group.replace(",", "")) > 10_000 for group in counts.groups())


def test_four_processes_train_what_one_of_them_may_not_hold(text: Path) -> None:
    options = ["--layers", 8, "--width", 384, "--steps", 2, "--limit", 200]
    printed = smdrun("limited.py", text, *options, ranks=4)
    assert "In one process without smp" in printed and "can't allocate memory" in printed
    assert "step 2: loss" in printed
    assert re.search(r"Adam's state: 2\d\d MiB, in each process \d\d, \d\d, \d\d, \d\d\n", printed)

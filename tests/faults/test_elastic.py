"""A job that goes on after a kill, and then on fewer ranks, has the losses of one that nothing disturbs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.elastic import SCRIPT, SMALL, losses, run_dying
from tests.scripts.test_smddp_scripts import environment
from tests.support.forked_jobs import start_job
from tests.support.ranks import RankPool
from tests.support.scripts import run_script


def test_losses_after_a_kill_and_on_fewer_ranks_are_those_of_an_undisturbed_run(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    options = [*SMALL, "--save-every", "2"]
    env = environment(OMP_NUM_THREADS="1")
    job = {"place": ["-n", "2"], "steps": 6, "options": options, "env": env, "start": start_job}
    disturbed = run_dying(tmp_path, [(1, 3, 0.0)], **job)
    assert {step for step, _ in disturbed.losses} == set(range(1, 7))
    assert len(disturbed.stalls) == 1

    def go_on(ranks: int, folder: str, steps: int) -> list[tuple[int, float]]:
        more = ["--folder", tmp_path / folder, "--steps", steps, "--partitions", 1]
        return losses(run_script(pool(ranks), SCRIPT, *options, *more).splitlines())

    on_fewer = go_on(1, "saved", 9)
    assert [step for step, _ in on_fewer] == [7, 8, 9]
    undisturbed = dict(go_on(1, "other", 9))
    for step, loss in [*disturbed.losses, *on_fewer]:
        assert loss == pytest.approx(undisturbed[step], abs=2e-5), step

"""A short campaign of damaged checkpoints, with a new seed every day; and a check that it can fail."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from opensmd.modelparallel.checkpoint import files
from tests.faults.damaged_checkpoints import Report, run
from tests.support.ranks import RankPool


def campaign(folder: str, trials: int, seed: int, *, blind: bool = False) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        if blind:
            patch.setattr(files, "verify", lambda path: None)
        return run(Path(folder), trials=trials, seed=seed)


def test_no_damaged_checkpoint_loads_wrong_or_ends_in_another_error(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    seed = datetime.datetime.now(datetime.UTC).date().toordinal()
    [report] = pool(1).run(campaign, str(tmp_path), 600, seed, backend="gloo")
    assert report.total() == 600
    assert not report.bad, f"seed {seed}\n{report}"


def blind_campaign(folder: str, trials: int, seed: int) -> Report:
    return campaign(folder, trials, seed, blind=True)


def test_the_campaign_finds_what_torchs_own_checks_let_through(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    [report] = pool(1).run(blind_campaign, str(tmp_path), 600, 1, backend="gloo")
    assert report.total("LOADED WRONG") > 0

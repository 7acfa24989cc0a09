"""The examples of the docs that need one of the libraries installed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import PATIENCE
from tests.scripts.test_docs import Example, examples, run_source
from tests.support.ranks import RankPool

NEEDING = [example for example in examples() if example.needs is not None]


@pytest.mark.parametrize("example", NEEDING, ids=lambda example: f"{example.needs}-{example.place}")
def test_example_runs(example: Example, pool: Any, tmp_path: Path) -> None:
    ranks: RankPool = pool(example.ranks)
    ranks.run(run_source, example, str(tmp_path), backend=None, timeout=PATIENCE)
    ranks.close(kill=True)  # libraries remember what they have seen first


def test_there_are_examples_for_what_is_installed() -> None:
    assert {example.needs for example in NEEDING} >= {
        "accelerate",
        "lightning",
        "pytorch-ignite",
        "ray",
        "transformers",
    }

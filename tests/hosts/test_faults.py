"""A fault of the campaign on two hosts, in every run; ``tests.faults.campaign --hosts`` draws many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_campaign import require_promises_kept


@pytest.mark.usefixtures("hosts")  # skips where this user may not make such
def test_who_sends_to_a_rank_whose_own_host_disagrees_hears_of_it_before_the_timeout(tmp_path: Path) -> None:
    """Its connection closes as Gloo begins to send, which Gloo then forgets: mostly so in this case."""
    case = ("--seed", "2611", "--first", "149", "--trials", "1", "--jobs", "1", "--timeout", "60")
    require_promises_kept(tmp_path, "--hosts", *case)

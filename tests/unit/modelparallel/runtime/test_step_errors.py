"""What the errors of a step say, and that a group on which one failed takes no other step."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch.distributed import DistBackendError

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.policies.policy import Progress
from opensmd.modelparallel.ranks.poisoned_groups import require_sound
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.step_errors import Explained, located, stopped


class Group:
    """Stands for a process group, which is only remembered."""


def at(index: int, point: str) -> Microbatch:
    microbatch = Microbatch(index)
    microbatch.point = point
    return microbatch


def test_a_waiting_rank_says_what_every_microbatch_in_flight_waits_for() -> None:
    microbatches = [
        (at(0, "the loss"), Progress.DONE),
        (at(1, "layer 3"), Progress.BACKWARD),
        (at(2, "layer 1"), Progress.FORWARD),
        (at(3, "the beginning"), Progress.NEW),
    ]
    assert str(stopped(DistBackendError("rank 1 died"), microbatches)) == (
        "the pipeline stopped: microbatch 1 waits in backward for layer 3; microbatch 2 waits in forward for "
        "layer 1. rank 1 died"
    )


@pytest.mark.parametrize(
    "text", ["recv: Timed out after 4000 ms; rank 1", "timed out after 4 ms; not arrived"]
)
def test_a_wait_in_vain_says_what_makes_ranks_wait_for_each_other(text: str) -> None:
    lost = DistBackendError(text)
    for found in (stopped(lost, [(at(0, "layer 1"), Progress.FORWARD)]), located(lost, at(0, "layer 1"))):
        assert f"{text}. If all ranks run, they have taken different ways" in str(found)
        assert "register_buffer" in str(found)


def test_an_error_inside_a_microbatch_is_located_only_if_it_is_the_groups() -> None:
    lost = DistBackendError("rank 1 died")
    found = located(lost, at(2, "layer 1"))
    assert isinstance(found, SMPError) and found.__cause__ is lost
    assert str(found) == "the pipeline stopped: microbatch 2 was at layer 1. rank 1 died"
    own = ValueError("of the script")
    assert located(own, at(2, "layer 1")) is own


def test_an_error_outside_of_microbatches_names_the_step_and_no_later_step_begins() -> None:
    def train() -> None:
        """Of the script."""

    group = cast(Any, Group())
    require_sound(group)
    with (
        pytest.raises(SMPError, match=r"^the step '.*train' stopped while it was planned: rank 1 died$"),
        Explained(train, "while it was planned", group),
    ):
        raise DistBackendError("rank 1 died")
    with pytest.raises(SMPError, match="a step failed on this process group before"):
        require_sound(group)

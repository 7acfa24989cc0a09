"""How long a rank waits for what its table has next."""

from __future__ import annotations

from opensmd.modelparallel.planning.policies.patience import SHARE, Patience


def waits(patience: Patience, *, came: bool, most: int = 1000) -> int:
    """How many waits, all of which end alike, a rank has patience for."""
    count = 0
    while patience.seconds and count < most:
        patience.has_waited(came=came)
        count += 1
    return count


def test_nothing_is_waited_for_before_a_step_has_been_measured() -> None:
    patience = Patience()
    assert patience.seconds == 0.0
    patience.step_has_ended([0.5, 0.25, 9.0])
    assert patience.seconds == SHARE * 0.5


def test_a_step_without_backwards_teaches_nothing() -> None:
    patience = Patience(2.0)
    patience.step_has_ended([])
    assert patience.seconds == SHARE * 2.0


def test_waits_in_vain_take_no_longer_than_one_action_together() -> None:
    patience = Patience(2.0)
    assert waits(patience, came=False) * SHARE == 1.0


def test_waits_that_are_worth_it_go_on_for_ever() -> None:
    assert waits(Patience(2.0), came=True) == 1000


def test_after_waits_in_vain_every_step_tries_once_and_one_success_restores_patience() -> None:
    patience = Patience(2.0)
    waits(patience, came=False)
    for _ in range(3):
        patience.step_has_ended([2.0])
        assert waits(patience, came=False) == 1
    patience.step_has_ended([2.0])
    patience.has_waited(came=True)
    assert waits(patience, came=False) * SHARE == 1.0

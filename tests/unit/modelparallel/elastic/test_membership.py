"""Who goes on together, from what the ranks have said."""

from __future__ import annotations

from collections.abc import Sequence

from opensmd.collectives.stores.replica_store import Replica
from opensmd.modelparallel.elastic.membership import Arrived, Decision, decide

A, B, C = Replica(0, 0), Replica(1, 0), Replica(2, 0)
AGAIN = Replica(1, 1)


def there(done: int, loop: int | None = None, *, has_state: bool = True, ranks: int = 2) -> list[Arrived]:
    return [Arrived(done, loop, has_state)] * ranks


def decided(
    before: dict[Replica, Sequence[Arrived]],
    *,
    ended: dict[Replica, int | None] | None = None,
    waiting: dict[Replica, int] | None = None,
    requests: int = 0,
    patience_is_over: bool = False,
) -> Decision | None:
    return decide(
        before,
        2,
        ended=ended or {},
        waiting=waiting or {},
        requests=requests,
        patience_is_over=patience_is_over,
    )


def test_all_are_waited_for_that_have_not_ended() -> None:
    assert decided({A: there(3), B: there(3, ranks=1)}) is None
    assert decided({A: there(3), B: []}) is None
    found = decided({A: there(3), B: there(3)})
    assert found == Decision((A, B), (), 3, 0, ())


def test_who_has_ended_is_lost_though_it_came() -> None:
    assert decided({A: there(3), B: there(3)}, ended={A: None}) == Decision((B,), (), 3, 0, (A,))


def test_who_does_not_come_in_time_is_given_up() -> None:
    found = decided({A: there(3), B: there(3, ranks=1)}, patience_is_over=True)
    assert found == Decision((A,), (), 3, 0, (B,))


def test_without_anybody_there_is_nothing_to_decide() -> None:
    assert decided({A: [], B: there(3, ranks=1)}, patience_is_over=True) is None


def test_a_point_that_one_has_passed_is_done_for_all() -> None:
    found = decided({A: there(3), B: there(4)}, ended={})
    assert found is not None
    assert found.done == 4


def test_a_point_that_a_replica_has_passed_that_came_to_its_end_is_done_for_all() -> None:
    assert decided({A: there(3), B: []}, ended={B: 4}) == Decision((A,), (), 4, 0, (B,))


def test_a_point_that_only_a_lost_replica_has_passed_is_done_again() -> None:
    found = decided({A: there(3), B: there(4)}, ended={B: None})
    assert found is not None
    assert found.done == 3


def test_replicas_join_where_all_stand_at_the_border_of_their_loop() -> None:
    at_border = {A: there(5, 1), C: there(5, 1)}
    found = decided(at_border, waiting={AGAIN: 1}, requests=1)
    assert found == Decision((A, C, AGAIN), (AGAIN,), 5, 1, ())


def test_replicas_do_not_join_within_a_step_and_ask_again_at_the_next_border() -> None:
    found = decided({A: there(5), C: there(5, 1)}, waiting={AGAIN: 1}, requests=1)
    assert found == Decision((A, C), (), 5, 0, ())


def test_replicas_of_another_loop_or_that_have_ended_do_not_join() -> None:
    at_border: dict[Replica, Sequence[Arrived]] = {A: there(5, 2)}
    assert decided(at_border, waiting={AGAIN: 1}, requests=1) == Decision((A,), (), 5, 1, ())
    found = decided(at_border, waiting={AGAIN: 2}, ended={AGAIN: None}, requests=1)
    assert found == Decision((A,), (), 5, 1, ())


def test_a_replica_whose_joining_was_cut_off_gets_its_state_from_the_others() -> None:
    found = decided({AGAIN: there(0, 1, has_state=False), A: there(5, 1)})
    assert found == Decision((A, AGAIN), (AGAIN,), 5, 0, ())


def test_nobody_goes_on_if_all_that_had_the_state_are_lost() -> None:
    found = decided({A: there(5, 1), AGAIN: there(0, 1, has_state=False)}, ended={A: None})
    assert found is not None
    assert found.members == ()


def test_a_decision_comes_through_the_store_as_it_was() -> None:
    found = Decision((A, AGAIN), (AGAIN,), 5, 1, (B,))
    assert Decision.from_json(found.to_json()) == found

"""Ranks agree in the job's store on who trains together; each replica has one rank here."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from opensmd.collectives.stores.replica_store import FINISHED, JobPlace, Replica, ReplicaStore
from opensmd.modelparallel.elastic.agreement import Agreement
from opensmd.modelparallel.elastic.membership import Arrived, Decision
from opensmd.modelparallel.exceptions import SMPError

FIRST, SECOND, RETURNED = Replica(0, 0), Replica(1, 0), Replica(1, 1)
HERE = Arrived(done=3, loop=None, has_state=True)
AT_THE_BORDER = Arrived(done=4, loop=1, has_state=True)


def agreement(store: ReplicaStore, replica: Replica, timeout: float = 60.0) -> Agreement:
    return Agreement(store, JobPlace("127.0.0.1:1", replica, 2, 0, 1, 0, 1), timeout)


def arrive(store: ReplicaStore, generation: int, replica: Replica, arrived: Arrived) -> None:
    store.arrive(generation, replica, 0, arrived.to_json())


def test_who_comes_is_in_the_next_generation_and_all_read_one_decision() -> None:
    store = ReplicaStore(HashStore())
    arrive(store, 0, SECOND, HERE)
    one, other = agreement(store, FIRST), agreement(store, SECOND)
    decision = one.next_generation(HERE)
    assert (decision.members, decision.done, decision.lost) == ((FIRST, SECOND), 3, ())
    assert other.next_generation(HERE) == decision
    assert (one.generation, other.generation) == (0, 0) and one.members == decision.members


def test_a_replica_that_has_ended_is_not_waited_for() -> None:
    store = ReplicaStore(HashStore())
    store.attempt_has_ended(1)
    decision = agreement(store, FIRST).next_generation(HERE)
    assert (decision.members, decision.lost) == ((FIRST,), (SECOND,))


def test_who_does_not_come_in_time_is_given_up_and_learns_it() -> None:
    store = ReplicaStore(HashStore())
    arrive(store, 0, SECOND, HERE)
    one, late = agreement(store, FIRST, timeout=0.05), agreement(store, SECOND)
    one.next_generation(HERE)
    late.next_generation(HERE)
    assert one.next_generation(HERE).members == (FIRST,)
    with pytest.raises(SMPError, match="the other replicas go on without replica 1"):
        late.next_generation(HERE)


def test_a_replica_that_has_lost_a_rank_does_not_go_on_alone() -> None:
    store = ReplicaStore(HashStore())
    store.attempt_has_ended(0)
    with pytest.raises(SMPError, match="replica 0 has lost one of its ranks"):
        agreement(store, FIRST).next_generation(HERE)


def test_a_replica_that_comes_back_is_let_in_at_the_border_that_it_waits_at() -> None:
    store = ReplicaStore(HashStore())
    store.attempt_has_ended(1)
    member = agreement(store, FIRST)
    member.next_generation(HERE)
    # what the replica that waits says; its own wait, which asks again and again, is below
    store.ask_to_join(RETURNED, 1)
    decision = member.next_generation(AT_THE_BORDER)
    assert (decision.members, decision.joined) == ((FIRST, RETURNED), (RETURNED,))
    assert member.requests == 1
    joining = agreement(store, RETURNED)
    assert joining.admission(1) == decision
    assert (joining.generation, joining.members) == (1, (FIRST, RETURNED))


def test_a_loop_that_is_over_lets_nobody_in() -> None:
    store = ReplicaStore(HashStore())
    store.set_number("loop", 2)
    assert agreement(store, RETURNED).admission(1) is None


def test_without_anybody_left_there_is_no_job_to_join() -> None:
    store = ReplicaStore(HashStore())
    store.attempt_has_ended(0)
    store.attempt_has_ended(1)
    with pytest.raises(SMPError, match="no replica is left that has the model's state"):
        agreement(store, RETURNED).admission(1)
    assert store.over is not None, "and smdrun need start no other"


def test_a_job_that_is_over_ends_whoever_comes() -> None:
    finished, failed = ReplicaStore(HashStore()), ReplicaStore(HashStore())
    finished.end(FINISHED)
    with pytest.raises(SystemExit) as ended:
        agreement(finished, RETURNED).require_job()
    assert ended.value.code == 0
    failed.end("too few are left")
    with pytest.raises(SMPError, match="too few are left"):
        agreement(failed, RETURNED).require_job()


def test_groups_are_made_once_every_member_knows_and_not_if_one_has_ended() -> None:
    store = ReplicaStore(HashStore())
    arrive(store, 0, SECOND, HERE)
    one, other = agreement(store, FIRST), agreement(store, SECOND)
    decision: Decision = one.next_generation(HERE)
    other.next_generation(HERE)
    store.is_ready(0)  # the other's word
    assert one.wait_until_all_know(decision)
    arrive(store, 1, SECOND, HERE)
    decision = one.next_generation(HERE)
    store.attempt_has_ended(1)
    assert not one.wait_until_all_know(decision)
    other.next_generation(HERE)
    assert not other.wait_until_all_know(decision), "what one has settled counts for all"

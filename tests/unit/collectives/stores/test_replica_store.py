"""The store of a job whose replicas come and go."""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore

from opensmd.collectives.stores.replica_store import JobPlace, Replica, ReplicaStore

PLACE = JobPlace("127.0.0.1:1234", Replica(1, 2), 3, 0, 2, 2, 6)


def test_a_place_comes_through_the_environment_as_it_was() -> None:
    found = {**PLACE.variables(), "TORCHELASTIC_RESTART_COUNT": "2"}
    assert (found["RANK"], found["WORLD_SIZE"]) == ("2", "6")
    assert JobPlace.from_environment(found) == PLACE
    assert JobPlace.from_environment({"RANK": "0", "WORLD_SIZE": "2"}) is None


def test_attempts_end_one_after_the_other() -> None:
    store = ReplicaStore(HashStore())
    store.attempt_has_ended(1)
    assert store.has_ended(Replica(1, 0))
    assert not store.has_ended(Replica(1, 1))
    assert not store.has_ended(Replica(0, 0))


def test_the_first_decision_and_the_first_reason_to_end_count() -> None:
    store = ReplicaStore(HashStore())
    assert (store.decision(1), store.over) == (None, None)
    store.decide(1, {"members": [0]})
    store.decide(1, {"members": [1]})
    assert store.decision(1) == {"members": [0]}
    store.end("")
    store.end("too few are left")
    assert store.over == ""
    assert store.settle(4, good=False) is False
    assert store.settle(4, good=True) is False


def test_who_arrives_and_who_asks_to_join_is_found_with_what_they_say() -> None:
    store = ReplicaStore(HashStore())
    store.arrive(3, Replica(0, 0), 1, {"done": 5})
    assert store.arrived(3, Replica(0, 0), 2) == [{"done": 5}]
    store.arrive(3, Replica(0, 0), 0, {"done": 4})
    assert store.arrived(3, Replica(0, 0), 2) == [{"done": 4}, {"done": 5}]
    store.ask_to_join(Replica(1, 1), 1)
    store.ask_to_join(Replica(2, 1), 1)
    store.ask_to_join(Replica(1, 1), 2)  # at the border of its next loop
    assert store.requests() == 3
    assert store.joining(but=[Replica(2, 1)]) == {Replica(1, 1): 2}


def test_a_replica_that_comes_to_its_end_leaves_word_of_it() -> None:
    store = ReplicaStore(HashStore())
    assert store.left(Replica(0, 0)) is None
    store.leave(Replica(0, 0), 7)
    assert store.left(Replica(0, 0)) == 7

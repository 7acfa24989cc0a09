"""What becomes of a job of several agents, by how each of them ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from opensmd.collectives.stores.replica_store import ADDRESS, JobPlace, Replica, ReplicaStore
from opensmd.launch.elastic.hosts_of_replicas import HostPlace
from opensmd.launch.elastic.replica_agents import JobEndedByRanksError, ReplicaAgents
from opensmd.launch.output.logs import Place

End = Callable[[JobPlace, Callable[[], None]], None]  # (a replica's first rank, before a further attempt)


class Said:
    """A console that only keeps what smdrun says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def agents(end: End) -> tuple[ReplicaAgents, Said]:
    """Two replicas of two ranks, each of which does what ``end`` says."""

    def launch(before_attempt: Callable[[], None], place: Place) -> None:
        before_attempt()
        environment = {"TORCHELASTIC_RESTART_COUNT": "0"}
        place(environment, 0)
        found = JobPlace.from_environment(environment)
        assert found is not None
        end(found, before_attempt)

    said = Said()
    return ReplicaAgents(2, 2, 1, launch, said, HostPlace()), said  # type: ignore[arg-type]


def fail(place: JobPlace) -> None:
    failure = ProcessFailure(local_rank=1, pid=os.getpid(), exitcode=-9, error_file="<none>")
    raise ChildFailedError("train.py", {1: failure})


def test_a_job_is_well_if_one_replica_comes_to_its_end() -> None:
    def end(place: JobPlace, _: Callable[[], None]) -> None:
        if place.replica.number == 1:
            fail(place)
        store = ReplicaStore.at(place.address)
        while not store.has_ended(Replica(1, 0)):
            pass

    job, said = agents(end)
    assert job.run() == {}
    assert said.lines == ["replica 1 (ranks 2, 3) has ended for good; the others go on without it"]


def test_a_replica_that_cannot_be_started_again_is_said() -> None:
    def end(place: JobPlace, before_attempt: Callable[[], None]) -> None:
        if place.replica.number == 1:
            before_attempt()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        store = ReplicaStore.at(place.address)
        while not store.has_ended(Replica(1, 1)):
            pass

    job, said = agents(end)
    assert job.run() == {}
    assert said.lines[1:] == [
        "replica 1 (ranks 2, 3) could not be restarted ([Errno 11] Resource temporarily unavailable); "
        "the others go on without it"
    ]


def test_failures_have_the_ranks_of_the_job_if_none_does() -> None:
    job, _ = agents(lambda place, _: fail(place))
    assert sorted(job.run()) == [1, 3]


def test_a_restart_is_said_and_counts_as_the_end_of_the_attempt_before() -> None:
    def end(place: JobPlace, before_attempt: Callable[[], None]) -> None:
        if place.replica.number == 0:
            store = ReplicaStore.at(place.address)
            while not store.has_ended(Replica(1, 0)):
                pass
            return
        before_attempt()
        fail(place)

    job, said = agents(end)
    assert job.run() == {}
    assert said.lines[0] == "replica 1 (ranks 2, 3) has ended; restart 1 of 1"


def test_nothing_is_started_again_once_the_ranks_have_ended_the_job() -> None:
    def end(place: JobPlace, before_attempt: Callable[[], None]) -> None:
        ReplicaStore.at(place.address).end("too few replicas are left")
        with pytest.raises(RendezvousClosedError):
            before_attempt()
        fail(place)

    job, _ = agents(end)
    with pytest.raises(JobEndedByRanksError, match="too few replicas are left"):
        job.run()


def test_ranks_of_other_jobs_have_no_place() -> None:
    assert ADDRESS not in os.environ
    assert JobPlace.from_environment(os.environ) is None

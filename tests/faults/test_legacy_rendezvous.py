"""Processes that come late, twice, too many, with other numbers, or never: everyone is told, or it works."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist_now
import torch.distributed.deprecated as dist

from opensmd.legacy.rendezvous import join, tcp
from opensmd.legacy.rendezvous.address import parse_init_method
from opensmd.legacy.rendezvous.host import Process
from opensmd.legacy.rendezvous.multicast import ALL_HEARD, Announcement, Voice, find_leader
from opensmd.legacy.rendezvous.rendezvous import Rendezvous
from opensmd.legacy.rendezvous.roster import Member
from opensmd.legacy.rendezvous.server import Server
from opensmd.legacy.settings import Deadline
from tests.support.multicast import multicast_address
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import RankPool, started

Attempt = dict[str, Any]
_news: dist_now.Store  # what the processes of a test have done, as they tell each other
_rendezvous: list[dist_now.Store] = []


def attempt(roles: list[Attempt]) -> str:
    """Join as this process's role says and sum the ranks; the outcome as a text.

    A role is the keywords of ``init_process_group``, with ``timeout`` and

    - ``wait``: seconds to come later than those without,
    - ``after``: what must have happened before, such as "joined 2" or "arrived 2" (in the rendezvous),
    - ``stays_until``: what must have happened before this process leaves the job,
    - ``over_at``: what must have happened before its time is over, however long that takes,
    - ``speakers``: how many processes speak at a multicast address, all of whom this one hears at once.

    All processes begin at once.
    """
    global _news
    port, size = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    serves = os.environ["RANK"] == "0"
    _rendezvous.clear()
    # kept after the end, for those who still wait in it
    _news = dist_now.TCPStore("127.0.0.1", port, size, serves, timedelta(seconds=PATIENCE))
    role = dict(roles[int(os.environ["RANK"])])
    os.environ["OPENSMD_LEGACY_ENGINE"] = "gloo"
    os.environ["OPENSMD_LEGACY_INTERFACE"] = "lo"
    os.environ["OPENSMD_LEGACY_TIMEOUT"] = str(role.pop("timeout", PATIENCE))
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        if name in role:
            os.environ[name] = str(role.pop(name))
    time.sleep(role.pop("wait", 0))
    if after := role.pop("after", None):
        _news.wait([after])
    if role.pop("absent", False):
        return "absent"
    stays_until, over_at, speakers = (role.pop(key, None) for key in ("stays_until", "over_at", "speakers"))
    try:
        with told_of(over_at, speakers):
            dist.init_process_group("tcp", **role)
    except (RuntimeError, ValueError) as error:
        tell("told")
        return str(error)
    tell("joined")
    try:
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        if stays_until:
            _news.wait([stays_until])
        return f"rank {dist.get_rank()} sum {total.item():g}"
    finally:
        dist.destroy_process_group()


def tell(what: str) -> None:
    """Let the others know that this is the first process, or the second, that has done something."""
    _news.set(f"{what} {_news.add(what, 1)}", "")


@contextmanager
def told_of(over_at: Any, speakers: Any) -> Iterator[None]:
    """A rendezvous that tells the others when this process has arrived; its store stays for who is late."""
    gather, listen = Rendezvous._gather, Voice.listen
    heard: dict[str, Announcement] = {}

    def tell_and_gather(self: Rendezvous, world_size: int) -> list[Member]:
        _rendezvous.append(self._store)
        tell("arrived")
        return gather(self, world_size)

    def listen_to_all(self: Voice, seconds: float) -> Iterator[Announcement]:
        before = len(heard)
        heard.update((one.token, one) for one in listen(self, seconds))
        if len(heard) < speakers:
            return
        if before < speakers:
            tell("heard all")
        yield from heard.values()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rendezvous, "_gather", tell_and_gather)
        if speakers:
            patch.setattr(Voice, "listen", listen_to_all)
        if over_at:
            patch.setattr(join, "Deadline", lambda seconds: OverAt(seconds, over_at))
        yield


class OverAt(Deadline):
    """So many ``seconds``, which are over when the others have told of something."""

    def __init__(self, seconds: float, what: str) -> None:
        super().__init__(PATIENCE)
        self.seconds = seconds
        self._what, self._is_told = what, False

    @property
    def passed(self) -> bool:
        # Not at the first look: what its caller has seen may have been before.
        was_told, self._is_told = self._is_told, _news.check([self._what])
        return was_told


def at_port(port: int, rank: int, world_size: int, **more: object) -> Attempt:
    return {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": world_size, **more}


def works(world_size: int) -> list[str]:
    return [f"rank {rank} sum {world_size * (world_size - 1) // 2}" for rank in range(world_size)]


def test_a_late_process_is_waited_for(pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    port = free_port()
    assert pool(3).run(
        attempt, [at_port(port, r, 3, wait=0.7 * (r == 0)) for r in range(3)], backend=None
    ) == works(3)
    file = {"init_method": f"file://{tmp_path}/meet", "world_size": 3}
    late = pool(3).run(attempt, [{**file, "wait": 0.7 * (r == 1)} for r in range(3)], backend=None)
    assert sorted(late) == works(3)
    cast = {"init_method": multicast_address(), "world_size": 3}
    late = pool(3).run(attempt, [{**cast, "wait": 0.7 * (r == 2)} for r in range(3)], backend=None)
    assert sorted(late) == works(3)


def test_ranks_that_were_asked_for_are_kept_and_the_others_filled_in(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    for method in (f"file://{tmp_path}/meet", multicast_address()):
        common = {"init_method": method, "world_size": 3}
        outcome = pool(3).run(attempt, [{**common, "rank": 2}, common, {**common, "rank": 0}], backend=None)
        assert outcome == ["rank 2 sum 3", "rank 1 sum 3", "rank 0 sum 3"]


def test_who_is_missing_is_named_to_everyone_who_came(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    absent: Attempt = {"absent": True}
    port = free_port()
    over: Attempt = {"timeout": 3.0, "over_at": "arrived 2"}
    roles = [at_port(port, 0, 3, **over), absent, at_port(port, 2, 3, **over)]
    for text in pool(3).run(attempt, roles, backend=None)[::2]:
        assert "waited 3 s for 3 processes and 2 came" in text
        assert "missing: rank 1" in text and "OPENSMD_LEGACY_TIMEOUT" in text
    heard: Attempt = {"over_at": "heard all 2", "speakers": 2}
    for method, more, said in (
        (f"file://{tmp_path}/meet", {}, "missing: one process"),
        (multicast_address(), heard, "heard 2 of 3 processes"),
    ):
        common = {"init_method": method, "world_size": 3, **over, **more}
        for text in pool(3).run(attempt, [common, absent, common], backend=None)[::2]:
            assert said in text
    assert list(tmp_path.iterdir()) == []
    roles = [absent, at_port(free_port(), 1, 3, timeout=1.0), absent]
    assert "rank 0 did not answer" in pool(3).run(attempt, roles, backend=None)[1]


def test_a_process_too_many_is_told_and_the_job_goes_on(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    port = free_port()
    roles = [at_port(port, rank, 2, stays_until="told 1") for rank in range(2)]
    outcome = pool(3).run(attempt, [*roles, at_port(port, 1, 2, after="joined 2")], backend=None)
    assert outcome[:2] == works(2)
    assert "already has" in outcome[2]
    for method in (f"file://{tmp_path}/meet", multicast_address()):
        common = {"init_method": method, "world_size": 2}
        roles = [common, common, {**common, "after": "joined 2", "timeout": 1.0}]
        outcome = pool(3).run(attempt, roles, backend=None)
        assert sorted(outcome[:2]) == works(2)
        assert "missing: one process" in outcome[2] or "heard 1 of 2" in outcome[2]


def test_a_rank_taken_twice_is_an_error_on_every_rank(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    port = free_port()
    file = {"init_method": f"file://{tmp_path}/meet", "world_size": 3, "rank": 1}
    # the one too many comes last: those who left before with an error could not be told of a later one
    for roles in (
        [at_port(port, 0, 3), at_port(port, 1, 3), at_port(port, 1, 3, after="arrived 2")],
        [{**file, "rank": 0}, file, {**file, "after": "arrived 2"}],
    ):
        for text in pool(3).run(attempt, roles, backend=None):
            assert "rank 1 was taken twice" in text and "start all again" in text
    roles = [at_port(port, 0, 3), at_port(port, 1, 3), at_port(port, 3, 3, after="arrived 2")]
    for text in pool(3).run(attempt, roles, backend=None):
        assert "asks for rank 3; expected 0 to 2" in text


def test_an_impossible_rank_is_refused_at_once_where_nobody_can_be_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENSMD_LEGACY_TIMEOUT", str(10 * PATIENCE))  # a test that waits for it fails
    monkeypatch.setenv("OPENSMD_LEGACY_INTERFACE", "lo")
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    methods = [f"tcp://127.0.0.1:{port}", "env://", f"file://{tmp_path}/meet", multicast_address()]
    for method in methods:
        with pytest.raises((ValueError, RuntimeError), match="asks for rank 2; expected 0 to 1"):
            dist.init_process_group("tcp", method, rank=2, world_size=2)
    with pytest.raises(ValueError, match="asks for rank -5; expected 0 to 1"):
        dist.init_process_group("tcp", f"file://{tmp_path}/meet", rank=-5, world_size=2)


def test_two_world_sizes_are_an_error_on_every_rank(pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    port = free_port()
    file = {"init_method": f"file://{tmp_path}/meet", "world_size": 3}
    cast = {"init_method": multicast_address(), "world_size": 3, "speakers": 3}
    for roles in (
        [at_port(port, 0, 3), at_port(port, 1, 3), at_port(port, 2, 4, after="arrived 2")],
        [file, file, {**file, "world_size": 4, "after": "arrived 2"}],
        [cast, cast, {**cast, "world_size": 4}],
    ):
        for text in pool(3).run(attempt, roles, backend=None):
            assert "was started with world_size" in text and "give all processes the same" in text


def test_who_disagrees_hears_everybody_before_going_to_a_store() -> None:
    """What a follower shouts may come before what its leader does, and however much earlier."""
    address = parse_init_method(multicast_address())
    deadline = Deadline(PATIENCE)
    own = Announcement("c", 4, "")
    follower, leader = (Announcement(token, 3, "", leader="b") for token in "ab")

    def others() -> None:
        with Voice(address, "lo", "") as voice:
            for token in (follower, follower, leader):
                voice.shout(token)
                time.sleep(ALL_HEARD)

    with Voice(address, "lo", "") as voice:
        thread = threading.Thread(target=others)
        thread.start()
        assert find_leader(voice, own, address, "lo", deadline) == leader
        thread.join()


def test_two_jobs_share_an_address_or_a_file_under_two_names(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    for method in (f"file://{tmp_path}/meet", multicast_address()):
        roles = [{"init_method": method, "world_size": 2, "group_name": f"job {r % 2}"} for r in range(4)]
        outcome = pool(4).run(attempt, roles, backend=None)
        assert sorted(outcome[::2]) == sorted(outcome[1::2]) == works(2)
    assert list(tmp_path.iterdir()) == []


def test_two_jobs_at_one_tcp_address_end_with_errors_not_with_a_hang(
    pool: Callable[[int], RankPool],
) -> None:
    port = free_port()
    first = [at_port(port, rank, 2, stays_until="told 2") for rank in range(2)]
    second = [at_port(port, rank, 2, after="joined 2") for rank in range(2)]
    *outcome, server, other = pool(4).run(attempt, [*first, *second], backend=None)
    assert outcome == works(2)
    assert "the port is in use" in server
    assert "of a job of 2, which already has: rank" in other


def test_a_port_that_another_program_uses_is_an_error_on_every_rank(pool: Callable[[int], RankPool]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        outcome = pool(3).run(attempt, [at_port(port, r, 3, timeout=2) for r in range(3)], backend=None)
    assert "the port is in use" in outcome[0]
    for text in outcome[1:]:
        assert "is not the store of rank 0" in text and "choose a free one" in text


def test_a_stale_file_is_taken_over_and_another_kind_of_file_is_refused(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = tmp_path / "meet"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead_here = Server(replace(Process.this(), pid=ended.pid), free_port(), ())
    elsewhere = replace(Process.this(), pid_space="another host", net_space="another host")
    dead_there = Server(elsewhere, free_port(), ("127.0.0.2",))
    roles = [{"init_method": f"file://{path}", "world_size": 3}] * 3
    for left_behind in (dead_here, dead_there):
        path.write_text(
            json.dumps({"format": "opensmd.legacy 1", "jobs": {"": json.dumps(asdict(left_behind))}})
        )
        assert sorted(pool(3).run(attempt, roles, backend=None)) == works(3)
        assert not path.exists()
    path.write_text("")  # as NamedTemporaryFile leaves it
    assert sorted(pool(3).run(attempt, roles, backend=None)) == works(3)
    path.write_text("my thesis")
    for text in pool(3).run(attempt, roles, backend=None):
        assert "holds something else" in text
    assert path.read_text() == "my thesis"
    roles = [{"init_method": f"file://{tmp_path}/no/such/folder", "world_size": 3}] * 3
    for text in pool(3).run(attempt, roles, backend=None):
        assert "No such file or directory" in text and "directory" in text


def meet_again_and_again(init_method: str, world_size: int) -> list[int]:
    """One file or address, many jobs, one straight after another, however late rank 0 leaves each."""
    os.environ["OPENSMD_LEGACY_ENGINE"] = "gloo"
    os.environ["OPENSMD_LEGACY_INTERFACE"] = "lo"
    os.environ["OPENSMD_LEGACY_TIMEOUT"] = str(PATIENCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tcp, "RECONNECT_SECONDS", 0.0)
        return sums_of_jobs(init_method, world_size)


def sums_of_jobs(init_method: str, world_size: int) -> list[int]:
    sums = []
    for turn in range(5):
        rank = int(os.environ["RANK"]) if "127.0.0.1" in init_method else -1
        dist.init_process_group("tcp", init_method, world_size=world_size, rank=rank)
        total = torch.tensor(turn + dist.get_rank())
        dist.all_reduce(total)
        sums.append(int(total))
        if turn == 0 and dist.get_rank() == 0:
            time.sleep(0.1)
        dist.destroy_process_group()
    return sums


@pytest.mark.parametrize("method", ["file", "tcp", "multicast"])
def test_one_address_serves_job_after_job(
    pool: Callable[[int], RankPool], tmp_path: Path, method: str
) -> None:
    port = free_port()
    addresses = {"file": f"file://{tmp_path}/meet", "tcp": f"tcp://127.0.0.1:{port}"}
    init_method = addresses.get(method, multicast_address())
    for sums in pool(3).run(meet_again_and_again, init_method, 3, backend=None):
        assert sums == [3, 6, 9, 12, 15]
    assert list(tmp_path.iterdir()) == []


def die_when_arrived(roles: list[Attempt]) -> str:
    """Rank 1 arrives and dies."""
    if os.environ["RANK"] == "1":
        Rendezvous._gather = lambda self, world_size: os._exit(9)  # type: ignore[method-assign]
    return attempt(roles)


def test_a_process_that_dies_while_the_others_gather_is_an_error_on_every_rank() -> None:
    ports = free_port(), free_port()
    together = [at_port(ports[0], rank, 3) for rank in range(3)]
    late = [*(at_port(ports[1], rank, 3) for rank in range(2)), at_port(ports[1], 2, 3, after="told 1")]
    # who serves a rendezvous waits some seconds for the dead to read its error: both jobs at once
    with (
        started(3, die_when_arrived, together, backend=None) as one,
        started(3, die_when_arrived, late, backend=None) as other,
    ):
        outcomes = one.answers(), other.answers()
    assert [outcome[1].kind for outcome in outcomes] == ["died", "died"]
    for rank in (0, 2):
        text = outcomes[0][rank].value
        assert "rank 1 (process" in text and "ended before all processes had joined" in text
    for rank in (0, 2):
        assert "ended before all processes had joined" in outcomes[1][rank].value

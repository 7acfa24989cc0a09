"""``Callers``: ranks and strangers that call, and are slow to say who they are."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from threading import Thread

import pytest

from opensmd.environment.job_secret import JobSecret
from opensmd.legacy.settings import Deadline
from opensmd.legacy.transports.callers import Callers, introduce
from tests.support.patience import PATIENCE

SECRET = JobSecret(b"of the job")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as made:
        yield made


def call(listener: socket.socket) -> socket.socket:
    return socket.create_connection(listener.getsockname(), timeout=PATIENCE)


def say_who(link: socket.socket, rank: int) -> Thread:
    thread = Thread(target=introduce, args=(link, 0, rank, SECRET))
    thread.start()
    return thread


def is_hung_up(link: socket.socket) -> bool:
    try:
        return link.recv(1) == b""
    except ConnectionError:  # with something unread
        return True


def test_a_rank_that_is_held_up_in_its_greeting_holds_up_nobody(listener: socket.socket) -> None:
    with Callers(listener, 0, SECRET) as callers, call(listener) as slow, call(listener) as quick:
        thread = say_who(quick, 2)
        peer, link = callers.next({1, 2}, Deadline(PATIENCE))
        assert peer == 2
        thread.join()
        link.close()

        thread = say_who(slow, 1)
        peer, link = callers.next({1}, Deadline(PATIENCE))
        assert peer == 1
        thread.join()
        slow.sendall(b"hello")
        assert link.recv(5) == b"hello"
        link.close()


def test_who_says_nothing_is_hung_up_on_in_the_end(listener: socket.socket) -> None:
    with call(listener) as silent:
        with Callers(listener, 0, SECRET) as callers, call(listener) as other:
            thread = say_who(other, 1)
            _, link = callers.next({1}, Deadline(PATIENCE))
            thread.join()
            link.close()

        assert is_hung_up(silent)


def test_a_rank_that_nobody_expects_is_turned_away(listener: socket.socket) -> None:
    with call(listener) as unexpected, call(listener) as other:
        with Callers(listener, 0, SECRET) as callers:
            threads = [say_who(unexpected, 2), say_who(other, 1)]
            peer, link = callers.next({1}, Deadline(PATIENCE))
            assert peer == 1
            link.close()
        for thread in threads:
            thread.join()
        assert is_hung_up(unexpected)


def test_names_who_has_not_called(listener: socket.socket) -> None:
    with Callers(listener, 0, SECRET) as callers, pytest.raises(RuntimeError) as raised:
        callers.next({3, 1}, Deadline(0.01))

    assert str(raised.value) == "rank(s) 1, 3 did not connect within 0.01 s"

"""Who can reach a job's connections but does not know its secret: no pickle of his is loaded."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from opensmd.environment.job_secret import JobSecret, SecretError
from opensmd.legacy.rendezvous.host import Process
from opensmd.legacy.rendezvous.rendezvous import Joined
from opensmd.legacy.settings import Deadline
from opensmd.legacy.transports import callers, links
from tests.support.patience import PATIENCE
from tests.support.ranks import run_once

SECRET = "known to the job's hosts alone"


class Malicious:
    """A pickle that leaves a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def join(rank_with: int | None = None) -> int:
    """Join as a host of one's own; where a rank is named, it alone knows the secret."""
    rank = int(os.environ["RANK"])
    os.environ["OPENSMD_HOST_ID"] = f"host {rank}"
    if rank_with in (None, rank):
        os.environ["OPENSMD_JOB_SECRET"] = SECRET
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    dist.init_process_group("smddp", rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    return rank


def run_with_stranger(folder: Path) -> list[str]:
    """Rank 1's pickles are made without the secret, as by somebody who has taken its connections."""
    from opensmd.modelparallel.runtime.messages.group_transport import GroupTransport

    rank = join()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": 0}, {"rank": 1}]
    transport = GroupTransport(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    if rank == 0:
        transport.send_object(1, 7, ["from", 0])
        transport.flush()
    else:
        assert transport.receive_object(0, 7) == ["from", 0]
    return _be_stranger(folder) if rank == 1 else _meet_stranger(transport)


def _be_stranger(folder: Path) -> list[str]:
    distributed_c10d._pickler = pickle.Pickler
    evil = Malicious(folder / "loaded")
    with suppress(SecretError):
        dist.all_gather_object([None, None], evil)
    dist.send_object_list([evil], dst=0)
    data = torch.frombuffer(bytearray(pickle.dumps(evil)), dtype=torch.uint8)
    dist.send(torch.tensor([data.numel()]), 0, tag=7)
    dist.send(data, 0, tag=7)
    dist.barrier()
    return []


def _meet_stranger(transport: Any) -> list[str]:
    texts = []
    for receive in (
        lambda: dist.all_gather_object([None, None], "mine"),
        lambda: dist.recv_object_list([None], src=1),
        lambda: transport.receive_object(1, 7),
    ):
        with pytest.raises(SecretError) as refused:
            receive()
        texts.append(str(refused.value))
    dist.barrier()
    return texts


def test_no_pickle_is_loaded_that_was_made_without_the_secret(tmp_path: Path) -> None:
    outcomes = run_once(2, run_with_stranger, tmp_path, backend=None)
    assert [outcome.kind for outcome in outcomes] == ["value", "value"], [one.text for one in outcomes]
    assert len(outcomes[0].value) == 3
    for text in outcomes[0].value:
        assert "bears no code of this job's secret" in text
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_the_secret_does_not_join() -> None:
    outcomes = run_once(2, join, 0, backend=None)
    assert outcomes[0].kind == outcomes[1].kind == "error"
    assert isinstance(outcomes[0].value, dist.DistBackendError)
    assert "bears no code of this job's secret. Give OPENSMD_JOB_SECRET" in str(outcomes[0].value)


class OverWhenTold(Deadline):
    """Five seconds, which are over when ``over`` is set, however long that takes."""

    def __init__(self, over: threading.Event) -> None:
        super().__init__(5.0)
        self._over = over

    def remaining(self) -> float:
        return 0.05

    @property
    def passed(self) -> bool:
        return self._over.is_set()


def connect(store: dist.Store, rank: int, into: dict[int, Any], deadline: Deadline) -> None:
    try:
        joined = Joined(store, rank, (Process.this(), Process.this()), serves=rank == 0)
        into[rank] = links.connect_all(joined, None, deadline)
    except RuntimeError as error:
        into[rank] = str(error)


@pytest.mark.parametrize("known", [True, False])
def test_links_of_the_legacy_package_are_made_by_who_knows_the_secret(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_thread = threading.local()
    monkeypatch.setattr(links, "job_secret", lambda: by_thread.secret)
    store, results, all_have_called = dist.HashStore(), dict[int, Any](), threading.Event()

    def rank(number: int, secret: str) -> None:
        by_thread.secret = JobSecret(secret.encode())
        ends_early = number == 0 and not known
        connect(store, number, results, OverWhenTold(all_have_called) if ends_early else Deadline(PATIENCE))

    listener = threading.Thread(target=rank, args=(0, SECRET))
    listener.start()
    store.wait(["links/0"], timedelta(seconds=PATIENCE))
    port = links.Server.from_json(store.get("links/0")).port
    with socket.create_connection(("127.0.0.1", port)) as stranger:  # who knows the protocol, and a rank
        stranger.sendall(callers.HELLO.pack(b"n" * 32, 1))
        answer = stranger.recv(callers.ANSWER.size, socket.MSG_WAITALL)
        stranger.sendall(answer[-32:])  # the listener's own proof
        rank(1, SECRET if known else "a guess of a stranger")
        all_have_called.set()
        listener.join()
    if known:
        assert results[0].keys() == {1} and results[1].keys() == {0}
        results[1][0].sendall(b"hello")
        assert results[0][1].recv(5) == b"hello"
        for link in (results[0][1], results[1][0]):
            link.close()
    else:
        assert "did not connect within 5 s; 2 callers did not know the secret of this job" in results[0]
        assert "does not know the secret of this job" in results[1]
        assert "give OPENSMD_JOB_SECRET alike" in results[1]

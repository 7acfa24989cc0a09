"""Groups whose ranks do not share memory: everything works, through Gloo.

Two "hosts" are made of this one by giving ranks different identities; where this user may make network
namespaces, also by two of those with a cable between them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from opensmd.collectives import _torch_internals
from opensmd.collectives.mailbox import has_mailbox
from tests.ranks import test_collectives_forms, test_collectives_groups, test_collectives_messages, test_ddp
from tests.ranks.test_collectives_table import (
    Failures,
    Op,
    check_moves,
    check_reductions,
    check_rooted_moves,
    places,
)
from tests.support.ranks import Outcome, run_once

ROOT = Path(__file__).resolve().parents[2]


def init_on(hosts: str) -> None:
    """Join the world as a process of the host that this rank's letter names."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["OPENSMD_HOST_ID"] = hosts[rank]
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    dist.init_process_group("smddp", rank=rank, world_size=size, timeout=timedelta(seconds=20))
    assert _torch_internals.cpu_backend(None).spans_hosts()
    assert not has_mailbox()


def run_cases(hosts: str) -> list[str]:
    init_on(hosts)
    failures = Failures()
    for place in places():
        for shape in [(), (0,), (7,), (3, 5), (70_001,)]:
            for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.float8_e4m3fn):
                check_moves(failures, place, dtype, shape)
                check_rooted_moves(failures, place, dtype, shape)
                check_reductions(failures, place, Op.SUM, dtype, shape)
            check_reductions(failures, place, Op.AVG, torch.int32, shape)
            check_reductions(failures, place, Op.MAX, torch.float64, shape)
            check_reductions(failures, place, Op.BXOR, torch.uint8, shape)
    return failures.texts


def run_forms(hosts: str) -> None:
    init_on(hosts)
    for case in test_collectives_forms.CASES:
        if case is not test_collectives_forms.run_allocated:
            case()
    messages = test_collectives_messages
    needing_shared_memory = (
        messages.run_mailbox,
        messages.run_everybody_sends_first,
        messages.run_wrong_dtypes,
        messages.run_dropped_handles,
    )
    for case in messages.CASES:
        if case not in needing_shared_memory:
            case()
    with pytest.raises(ValueError, match="cannot send to itself"):
        dist.isend(torch.ones(1), dist.get_rank())
    test_collectives_groups.run_groups_beside_groups()
    backend = _torch_internals.cpu_backend(None)
    assert not backend.supports_tensor_alloc(torch.device("cpu"))


def run_ddp(hosts: str) -> None:
    init_on(hosts)
    test_ddp.compare({}, {})
    test_ddp.compare({"accumulate": 2}, {"accumulate": 2, "gradient_as_bucket_view": True})
    test_ddp.run_sparse_gradients()
    # Ranks of one host still share memory in a group of their own.
    rank, size = dist.get_rank(), dist.get_world_size()
    for host in sorted(set(hosts)):
        ranks = [each for each in range(size) if hosts[each] == host]
        group = dist.new_group(ranks)
        if rank in ranks:
            assert has_mailbox(group)
            tensor = torch.ones(5)
            dist.all_reduce(tensor, group=group)
            assert tensor[0] == len(ranks)


def run_dying(hosts: str) -> str:
    init_on(hosts)
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(dist.DistBackendError) as first:
        for _ in range(3):
            dist.all_reduce(torch.ones(10))
    with pytest.raises(dist.DistBackendError):
        dist.barrier()
    return str(first.value)


def values(outcomes: list[Outcome]) -> list[Any]:
    for outcome in outcomes:
        assert outcome.kind == "value", outcome.text
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("hosts", ["ab", "aba"])
def test_every_collective_gives_what_plain_torch_gives(hosts: str) -> None:
    for failures in values(run_once(len(hosts), run_cases, hosts, backend=None, timeout=100)):
        assert failures == []


def test_every_form_of_call_works() -> None:
    values(run_once(3, run_forms, "aab", backend=None, timeout=100))


def test_ddp_trains_like_one_process_and_groups_within_a_host_share_memory() -> None:
    values(run_once(4, run_ddp, "abba", backend=None, timeout=100))


def test_the_death_of_a_rank_is_an_error_on_the_others() -> None:
    outcomes = run_once(3, run_dying, "aba", backend=None, timeout=40)
    assert outcomes[1].kind == "died"
    for rank in (0, 2):
        assert outcomes[rank].kind == "value", outcomes[rank].text
        assert "Gloo" in outcomes[rank].value and f"rank {rank}" in outcomes[rank].value


# ---------------------------------------------------------------- network namespaces

SCRIPT = """
import torch, torch.distributed as dist
from datetime import timedelta
import smdistributed.dataparallel.torch.torch_smddp
torch.set_num_threads(1)
dist.init_process_group("smddp", timeout=timedelta(seconds=30))
for count in (1, 1000, 1_000_000):
    tensor = torch.full((count,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    assert bool((tensor == 10).all())
found = [None] * 4
dist.all_gather_object(found, dist.get_rank())
assert found == [0, 1, 2, 3]
print("ok", dist.get_rank(), flush=True)
dist.destroy_process_group()
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_networks() -> Iterator[list[str]]:
    """Names of two network namespaces, 10.77.0.1 and 10.77.0.2, with a cable between them."""
    names = [f"opensmd-{os.getpid()}-{side}" for side in "ab"]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            # The ends of the cable are born inside: nothing is added to this machine's own network.
            ip(
                "-n",
                names[0],
                "link",
                "add",
                "cable",
                "type",
                "veth",
                "peer",
                "name",
                "cable",
                "netns",
                names[1],
            )
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this user may not make network namespaces")
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_ranks_in_two_networks_train_together(two_networks: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    started = []
    for rank in range(4):
        host = rank // 2
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "OPENSMD_HOST_ID": f"host {host}",
            "GLOO_SOCKET_IFNAME": "cable",
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29555",
            "RANK": str(rank),
            "WORLD_SIZE": "4",
        }
        command = ["ip", "netns", "exec", two_networks[host], sys.executable, str(script)]
        started.append(
            subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    try:
        for rank, process in enumerate(started):
            out, err = process.communicate(timeout=80)
            assert out.strip() == f"ok {rank}", err
    finally:
        for process in started:
            process.kill()
            process.wait()

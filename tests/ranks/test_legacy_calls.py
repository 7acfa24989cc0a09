"""Every function of the old API, over tcp and gloo, every way to initialise, two to four processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.deprecated as dist

from tests.scripts.legacy.calls import check_all
from tests.support.ranks import RankPool, free_port

pytestmark = pytest.mark.parametrize("world_size", [2, 3, 4])
METHODS = ["env", "tcp", "file", "multicast"]


def arguments(method: str, world_size: int, port: int, path: str) -> dict[str, object]:
    """The keywords of ``init_process_group`` on the rank that asks."""
    rank = int(os.environ["RANK"])
    if method == "env":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return {}
    if method == "tcp":
        return {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": world_size}
    if method == "file":
        return {"init_method": f"file://{path}", "world_size": world_size, "group_name": "calls"}
    os.environ["OPENSMD_LEGACY_INTERFACE"] = "lo"
    return {"init_method": f"tcp://239.255.77.1:{port}", "world_size": world_size, "group_name": "calls"}


def every_function(
    world_size: int, jobs: list[tuple[str, str, str]], ports: list[int], path: str
) -> list[int]:
    ranks = []
    for (backend, method, engine), port in zip(jobs, ports, strict=True):
        os.environ["OPENSMD_LEGACY_ENGINE"] = engine
        os.environ["OPENSMD_LEGACY_TIMEOUT"] = "30"
        dist.init_process_group(backend, **arguments(method, world_size, port, path))
        ranks.append(dist.get_rank())
        check_all()
        dist.destroy_process_group()
        assert not dist.is_initialized()
    return ranks


@pytest.mark.parametrize("engine", ["gloo", "auto"])
def test_every_function_works_over_tcp_and_gloo_by_every_method(
    pool: Callable[[int], RankPool], world_size: int, engine: str, tmp_path: Path
) -> None:
    jobs = [(backend, method, engine) for method in METHODS for backend in ("tcp", "gloo")]
    ranks = pool(world_size).run(
        every_function, world_size, jobs, [free_port() for _ in jobs], str(tmp_path / "meeting"), backend=None
    )
    for job in zip(*ranks, strict=True):
        assert sorted(job) == list(range(world_size))
    assert list(tmp_path.iterdir()) == []

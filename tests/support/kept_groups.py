"""Process groups that outlive what a test's function has made over them.

``DistributedDataParallel`` of torch 2.13 may be the last to hold its process group, when a function ends
after ``destroy_process_group``. It frees the group with the interpreter's lock held. Gloo's threads are
joined then, and one that is about to free its last call waits for that lock: both wait for ever. A loop of
plain PyTorch over Gloo hangs so within a hundred rounds on two cores. When Python frees the group itself,
it lets go of the lock first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["groups_outlive"]


@contextlib.contextmanager
def groups_outlive() -> Iterator[None]:
    """Hold what is destroyed inside of Gloo's process groups until the end, when nothing else holds it."""
    held: list[dist.ProcessGroup] = []
    destroy = dist.destroy_process_group

    def destroy_and_hold(group: dist.ProcessGroup | None = None) -> None:
        groups = dict(distributed_c10d._world.pg_map)
        destroyed = groups if group is None else [group]
        held.extend(group for group in destroyed if "gloo" in groups.get(group, ("",))[0])
        destroy(group)

    dist.destroy_process_group = destroy_and_hold
    try:
        yield
    finally:
        dist.destroy_process_group = destroy

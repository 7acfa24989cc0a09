"""What carries tensors between the stages of a job: shared memory, or the network between their hosts.

What is measured of a network is different whenever a job starts, and another plan gives sums other bits. So
plans go by what is given of it, and by usual speeds where nothing is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from opensmd.collectives.hosts.cost_model import USUAL_LINK, Cluster
from opensmd.collectives.locality import known_locality
from opensmd.environment.settings import Settings
from opensmd.modelparallel.planning.units import ON_ONE_HOST, Link, Links
from opensmd.modelparallel.ranks.grid import RankGrid
from opensmd.modelparallel.ranks.host_grid import HostGrid
from opensmd.modelparallel.settings.config import Config

__all__ = ["links_of_job", "stage_links"]


def links_of_job(cfg: Config, partitions: int) -> Links:
    """Between the stages of this job, if it had so many; on one host where its ranks have not met."""
    locality = known_locality()
    if locality is None or not locality.hosts:
        return Links()
    grid = RankGrid(
        dist.get_world_size(), partitions, cfg.tensor_parallel_degree, placement=cfg.placement_strategy
    )
    return stage_links(HostGrid(grid, locality.hosts), Settings.from_environment().network)


def stage_links(placed: HostGrid, given: Mapping[str, float]) -> Links:
    """Between the stages of ranks that are placed like this.

    Args:
        placed: what each rank does, and where.
        given: of the network, by the fields of ``Cluster``.
    """
    hosts = len(set(placed.hosts))
    if hosts == 1:
        return Links()
    cluster = Cluster(hosts, 1, **{"link": USUAL_LINK, **given})
    message = ON_ONE_HOST.message + cluster.delay + 2 * cluster.message
    rate = min(cluster.link / placed.sharing, cluster.sockets)
    return Links(Link(message, rate), placed.stages_apart, placed.averaging / cluster.link)

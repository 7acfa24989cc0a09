"""The links between the stages of a job: shared memory, or the network between their hosts.

Measurements of a network differ from start to start, and a different plan changes the bits of sums. So plans
use the given speeds, or else typical ones.
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
    """Return the links between so many stages of this job; on one host if its ranks have not met."""
    locality = known_locality()
    if locality is None or not locality.hosts:
        return Links()
    grid = RankGrid(
        dist.get_world_size(), partitions, cfg.tensor_parallel_degree, placement=cfg.placement_strategy
    )
    return stage_links(HostGrid(grid, locality.hosts), Settings.from_environment().network)


def stage_links(placed: HostGrid, given: Mapping[str, float]) -> Links:
    """Return the links between the stages of ranks placed like this.

    Args:
        placed: the position and the host of each rank.
        given: known properties of the network, by the fields of ``Cluster``.
    """
    hosts = len(set(placed.hosts))
    if hosts == 1:
        return Links()
    cluster = Cluster(hosts, 1, **{"link": USUAL_LINK, **given})
    message = ON_ONE_HOST.message + cluster.delay + 2 * cluster.message
    rate = min(cluster.link / placed.sharing, cluster.sockets)
    return Links(Link(message, rate), placed.stages_apart, placed.averaging / cluster.link)

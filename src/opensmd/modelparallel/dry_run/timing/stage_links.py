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
from opensmd.modelparallel.planning.units import BETWEEN_GPUS, ON_ONE_HOST, Link, Links
from opensmd.modelparallel.ranks.grid import RankGrid
from opensmd.modelparallel.ranks.host_grid import HostGrid
from opensmd.modelparallel.settings.config import Config

__all__ = ["links_of_job", "stage_links"]


def links_of_job(cfg: Config, partitions: int, *, gpus: bool = False) -> Links:
    """Return the links between so many stages of this job; on one host if its ranks have not met.

    Args:
        gpus: whether the model is on GPUs.
    """
    on_one_host = BETWEEN_GPUS if gpus else ON_ONE_HOST
    locality = known_locality()
    if locality is None or not locality.hosts:
        return Links(on_one_host=on_one_host)
    grid = RankGrid(
        dist.get_world_size(), partitions, cfg.tensor_parallel_degree, placement=cfg.placement_strategy
    )
    return stage_links(HostGrid(grid, locality.hosts), Settings.from_environment().network, on_one_host)


def stage_links(placed: HostGrid, given: Mapping[str, float], on_one_host: Link = ON_ONE_HOST) -> Links:
    """Return the links between the stages of ranks placed like this.

    Args:
        placed: the position and the host of each rank.
        given: known properties of the network, by the fields of ``Cluster``.
        on_one_host: the link between ranks of one host.
    """
    hosts = len(set(placed.hosts))
    if hosts == 1:
        return Links(on_one_host=on_one_host)
    cluster = Cluster(hosts, 1, **{"link": USUAL_LINK, **given})
    message = on_one_host.message + cluster.delay + 2 * cluster.message
    rate = min(cluster.link / placed.sharing, cluster.sockets)
    return Links(Link(message, rate), placed.stages_apart, placed.averaging / cluster.link, on_one_host)

"""One rank of the benchmark of sharded parameters: stacks of blocks take training steps in turn."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import smdistributed.modelparallel.torch as smp
from benchmarks.harness.rank import Rank
from benchmarks.harness.sampling import Candidate, timed
from benchmarks.harness.widths import measure_widths
from benchmarks.limits import NO_COMMUNICATION
from opensmd.modelparallel.ranks.groups import Groups

BLOCKS, ROWS = 4, 64
Step = Callable[[], Tensor]


def main() -> None:
    """Measure every width and leave the results to rank 0."""
    measure_widths(
        "sharded step",
        contestants,
        case=lambda width: (f"{BLOCKS} blocks of {width}", 0),
        backends=["gloo", "smddp", "fake"],
        finish=smp.shutdown,
    )


def contestants(me: Rank, width: int) -> list[Candidate]:
    """The library's stacks over smddp, and FSDP2's over both; all with the same values."""
    steps: dict[str, Step] = {"opensmd over smddp": ours(me, width)}
    for backend in ("gloo", "smddp"):
        steps[f"FSDP2 over {backend}"] = fsdp2(me, width, backend)
    losses = [step().item() for step in steps.values()]
    if max(losses) - min(losses) > 1e-5 * abs(losses[0]):
        raise RuntimeError(f"the losses differ: {dict(zip(steps, losses, strict=True))}")
    steps[NO_COMMUNICATION] = without_communication(steps["opensmd over smddp"], me)
    return [Candidate(name, timed(step)) for name, step in steps.items()]


def without_communication(step: Step, me: Rank) -> Step:
    """The library's step over torch's backend that does nothing: the least that any communication leaves.

    Its values are of no use, so it comes last; the model is the same, because a job has one.
    """
    model = smp.state.model.get_module()
    units = [each for each in model.modules() if isinstance(each, FSDPModule)]
    meshes = {id(mesh): mesh for unit in units for mesh in _meshes_of(unit)}.values()

    def over(backend: str) -> None:
        share_over(me.groups[backend])
        for mesh in meshes:
            mesh.shard_process_group = me.groups[backend]

    def alone() -> Tensor:
        over("fake")
        loss = step()
        over("smddp")
        return loss

    return alone


def _meshes_of(unit: FSDPModule) -> list[Any]:
    return [group.mesh_info for group in unit._get_fsdp_state()._fsdp_param_groups]


def stack(width: int) -> nn.Sequential:
    """Blocks as a transformer's between its attentions."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*blocks)


def inputs(me: Rank, width: int) -> Tensor:
    """This rank's part of the batch."""
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(me.rank))


def ours(me: Rank, width: int) -> Step:
    """A step of the library's, whose blocks are gathered twice, as FSDP2's."""
    smp.shutdown()
    smp.init(
        {
            "sharded_data_parallel_degree": me.size,
            "ddp": True,
            "sdp_param_persistence_threshold": 0,
            "sdp_max_live_parameters": 1,
            "sdp_gradient_clipping": 0.0,
        }
    )
    share_over(me.groups["smddp"])
    model = smp.DistributedModel(stack(width))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = train(x).reduce_mean()
        optimizer.step()
        return loss

    return functools.partial(step, inputs(me, width))


def share_over(group: dist.ProcessGroup) -> None:
    """Let the library's replicas be the ranks of ``group``; all ranks of the job are."""
    groups: Groups = smp.state.groups
    groups.shards = group
    for kind in (smp.CommGroup.DP_GROUP, smp.CommGroup.RDP_GROUP):
        groups._groups[kind] = group


def fsdp2(me: Rank, width: int, backend: str) -> Step:
    """A step of torch's FSDP2 over ``backend``."""
    mesh = DeviceMesh.from_group(me.groups[backend], "cpu")
    model = stack(width)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return functools.partial(step, inputs(me, width))


if __name__ == "__main__":
    main()

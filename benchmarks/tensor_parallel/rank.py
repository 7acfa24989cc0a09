"""One rank of the tensor-parallel benchmark: stacks of layers take training steps in turn."""

import copy
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from benchmarks.harness.rank import Rank
from benchmarks.harness.sampling import Candidate, timed
from benchmarks.harness.widths import measure_widths
from benchmarks.limits import NO_COMMUNICATION
from benchmarks.tensor_parallel.layers import HEAD, LAYERS, plain_stack
from opensmd.modelparallel.ranks.groups import Groups
from opensmd.modelparallel.ranks.shards import shards_of
from opensmd.modelparallel.state_dicts.distributed_parts import whole_entries

BATCH, WORDS = 4, 64


def main() -> None:
    """Measure every width and leave the results to rank 0."""
    measure_widths(
        "tensor parallel step",
        contestants,
        case=lambda width: (f"{LAYERS} layers of {width}", 0),
        backends=["gloo", "smddp", "fake"],
        finish=smp.shutdown,
    )


def contestants(me: Rank, width: int) -> list[Candidate]:
    """The library's layers over smddp, and torch's over both; all with the same values."""
    smp.shutdown()
    smp.init({"tensor_parallel_degree": me.size, "ddp": True, "prescaled_batch": True})
    share_over(me.groups["smddp"])
    torch.manual_seed(0)
    ours = smp.nn.DistributedTransformer(
        LAYERS,
        num_attention_heads=width // HEAD,
        attention_head_size=HEAD,
        hidden_size=width,
        intermediate_size=4 * width,
        attention_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        causal_mask_size=WORDS,
        pre_layernorm=True,
        post_layernorm=False,
    )
    values = whole_entries(ours.state_dict(), shards_of(ours))
    made: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
        "opensmd over smddp": (ours, lambda x: ours((x, None))[0])
    }
    for backend in ("gloo", "smddp"):
        stack = plain_stack(values, width, me.groups[backend])
        made[f"DTensor over {backend}"] = (stack, stack)
    steps = {name: training(model, call, width) for name, (model, call) in made.items()}
    losses = [step().item() for step in steps.values()]
    if max(losses) - min(losses) > 1e-5 * abs(losses[0]):
        raise RuntimeError(f"the losses differ: {dict(zip(steps, losses, strict=True))}")
    steps[NO_COMMUNICATION] = without_communication(copy.deepcopy(ours), me, width)
    return [Candidate(name, timed(step)) for name, step in steps.items()]


def without_communication(model: nn.Module, me: Rank, width: int) -> Callable[[], Tensor]:
    """The library's step over torch's backend that does nothing: the least that any communication leaves."""
    train = training(model, lambda x: model((x, None))[0], width)

    def step() -> Tensor:
        share_over(me.groups["fake"])
        loss = train()
        share_over(me.groups["smddp"])
        return loss

    return step


def share_over(group: dist.ProcessGroup) -> None:
    """Let the library's tensor-parallel ranks be those of ``group``; all ranks of the job are."""
    groups: Groups = smp.state.groups
    groups._groups[smp.CommGroup.TP_GROUP] = group


def training(model: nn.Module, call: Callable[[Tensor], Tensor], width: int) -> Callable[[], Tensor]:
    """A function that does one step and returns its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    inputs = torch.randn(BATCH, WORDS, width, generator=torch.Generator().manual_seed(1))

    def step(inputs: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = call(inputs).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return functools.partial(step, inputs)


if __name__ == "__main__":
    main()

"""Train a character-level GPT with two copies of a model that is split in two.

    smdrun -n 4 examples/model_parallel/hybrid.py
    smdrun -n 4 examples/model_parallel/hybrid.py --partitions 4
    smdrun -n 4 examples/model_parallel/hybrid.py --data my_book.txt --compare

Each copy sees its own part of every batch; gradients are averaged over copies while the last microbatch's
backward still runs. Four processes with ``--partitions 2`` make two copies.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt import Text, build, compare, loss_of, options, train_alone

import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model, inputs, targets):
    loss = loss_of(model(inputs), targets)
    model.backward(loss)
    return loss


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--partitions", type=int, default=2, help="processes that one copy is split over")
    parser.add_argument(
        "--placement", default="cluster", help="cluster: copies on neighbouring ranks; spread"
    )
    parser.add_argument("--compare", action="store_true", help="compare with a single process")
    args = parser.parse_args()

    smp.init(
        {
            "partitions": args.partitions,
            "ddp": True,
            "placement_strategy": args.placement,
            "microbatches": args.microbatches,
            "optimize": "speed",
        }
    )
    if smp.rank() == 0:
        print(f"{smp.dp_size()} copies of {smp.pp_size()} stages; ranks of the first: {smp.get_mp_group()}")
    text = Text(args)
    model = smp.DistributedModel(build(args, len(text.letters)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))

    losses = []
    for inputs, targets in text.batches(0, args.steps):
        mine = slice(smp.dp_rank(), None, smp.dp_size())
        optimizer.zero_grad()
        loss = train_step(model, inputs[mine], targets[mine]).reduce_mean()
        optimizer.step()
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        losses.append(loss.item() / smp.dp_size())
        if smp.rank() == 0 and len(losses) % 10 == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.4f}", flush=True)

    if args.compare and smp.rank() == 0:
        compare(losses, train_alone(args, text))
    smp.barrier()


if __name__ == "__main__":
    main()

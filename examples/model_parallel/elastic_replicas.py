"""Train a GPT in copies that drop out when a process of theirs dies, and join again from another's memory.

    smdrun -n 4 --elastic-replicas 2 --max-restarts 20 examples/model_parallel/elastic_replicas.py --pace 0.5

Kill a process while it runs: the other copy goes on in the same step, with its own share of the batch, and
takes the whole batch from the next step on. The killed copy starts again, and the two share the batches as
soon as it is there.
"""

from __future__ import annotations

import time

import torch
from gpt import Text, build, loss_of, options

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
        "--pace", type=float, default=0.0, help="seconds to wait after each step, to watch it"
    )
    args = parser.parse_args()

    settings = {"partitions": args.partitions, "ddp": True, "microbatches": args.microbatches}
    smp.init({**settings, "elastic": {"timeout": 60}})
    text = Text(args)
    model = smp.DistributedModel(build(args, len(text.letters)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.steps, end_factor=0.1)

    for step in smp.elastic_steps(range(args.steps), scheduler=scheduler):
        inputs, targets = next(text.batches(step, step + 1))
        mine = slice(smp.dp_rank(), None, smp.dp_size())
        optimizer.zero_grad()
        loss = train_step(model, inputs[mine], targets[mine]).reduce_mean().item()
        optimizer.step()
        scheduler.step()
        losses = smp.allgather(loss, smp.WORLD)
        if smp.rank() == 0:
            mean = sum(losses) / len(losses)
            print(f"step {step + 1}: loss {mean:.6f} with copies: {smp.dp_size()}", flush=True)
        time.sleep(args.pace)
    smp.barrier()


if __name__ == "__main__":
    main()

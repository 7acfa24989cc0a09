"""Train a GPT that goes on after failures, and on fewer processes, as if nothing had happened.

    smdrun -n 4 --max-restarts 20 examples/model_parallel/elastic.py --folder out/elastic
    smdrun -n 2 examples/model_parallel/elastic.py --folder out/elastic --steps 80

Kill a process while it runs: all start again and go on from the last checkpoint. The number of steps that it
holds is the position in the data: a step's batch follows from the step's number, and each copy of the model
takes its share of it, however many copies there are.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Text, build, loss_of, options

import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model, inputs, targets):
    loss = loss_of(model(inputs), targets)
    model.backward(loss)
    return loss


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/elastic"), help="for checkpoints")
    parser.add_argument("--partitions", type=int, default=2, help="processes that one copy is split over")
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    args = parser.parse_args()

    smp.init({"partitions": args.partitions, "ddp": True, "microbatches": args.microbatches})
    text = Text(args)
    model = smp.DistributedModel(build(args, len(text.letters)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))
    first = 0
    if (args.folder / "newest").exists():
        first = smp.resume_from_checkpoint(str(args.folder))["step"]

    for step, (inputs, targets) in enumerate(text.batches(first, args.steps), first + 1):
        mine = slice(smp.dp_rank(), None, smp.dp_size())
        optimizer.zero_grad()
        loss = train_step(model, inputs[mine], targets[mine]).reduce_mean().detach() / smp.dp_size()
        optimizer.step()
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        if smp.rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            content = {"step": step}
            saved = {"model": model, "optimizer": optimizer, "user_content": content}
            smp.save_checkpoint(str(args.folder), f"step_{step}", num_kept_partial_checkpoints=2, **saved)
    smp.barrier()


if __name__ == "__main__":
    main()

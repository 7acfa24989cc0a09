"""Save a training split over some processes, and go on with it split over another number of processes.

    smdrun -n 2 examples/model_parallel/resume.py --steps 20
    smdrun -n 4 examples/model_parallel/resume.py --steps 40 --resume
    smdrun -n 1 examples/model_parallel/resume.py --steps 60 --resume --export out/gpt.pt

Each process writes its own part of the checkpoint. ``--export`` also writes one file that plain PyTorch
reads: ``torch.load("out/gpt.pt")`` is the state dict of the model without smp.
"""

from __future__ import annotations

import os
from pathlib import Path

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
    parser.add_argument("--checkpoint", default="out/resume.pt")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--export", type=Path, help="write the whole model for plain PyTorch")
    args = parser.parse_args()

    smp.init({"partitions": int(os.environ.get("WORLD_SIZE", "1")), "microbatches": args.microbatches})
    text = Text(args)
    model = smp.DistributedModel(build(args, len(text.letters)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))
    first = 0
    if args.resume:
        saved = smp.load(args.checkpoint, partial=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    for step, (inputs, targets) in enumerate(text.batches(first, args.steps), first + 1):
        optimizer.zero_grad()
        loss = train_step(model, inputs, targets)
        optimizer.step()
        if smp.rank() == 0 and (step % 10 == 0 or step == first + 1):
            print(f"step {step}: loss {loss.reduce_mean():.4f}", flush=True)

    Path(args.checkpoint).parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.local_state_dict(),
        "optimizer": optimizer.local_state_dict(),
        "step": args.steps,
    }
    smp.save(state, args.checkpoint, partial=True)
    if args.export:
        whole = model.state_dict()
        if smp.rank() == 0:
            args.export.parent.mkdir(parents=True, exist_ok=True)
            smp.save(whole, str(args.export), partial=False)
    smp.barrier()


if __name__ == "__main__":
    main()

"""Train a character-level GPT that is split over processes.

    smdrun -n 2 examples/model_parallel/pipeline.py
    smdrun -n 2 examples/model_parallel/pipeline.py --data my_book.txt --layers 8 --width 256
    smdrun -n 2 examples/model_parallel/pipeline.py --compare --chart out/pipeline.png

Rank 0 logs which module lives where. ``--compare`` trains the same model in one process afterwards and
compares the losses; ``--chart`` draws who worked when in the last step.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from gpt import Text, build, compare, loss_of, options, train_alone

import opensmd
import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model, inputs, targets):
    loss = loss_of(model(inputs), targets)
    model.backward(loss)
    return loss


def chart(path: Path) -> None:
    """Draw the last step; called on all ranks."""
    events = opensmd.pipeline_events()
    if smp.rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        opensmd.draw_chart(events, path, title="one step", plan=opensmd.current_plan())
        shares = ", ".join(f"rank {rank} {share:.0%}" for rank, share in opensmd.busy_share(events).items())
        print(f"busy in the last step: {shares}; drawn in {path}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--chart", type=Path, help="a picture of the last step")
    parser.add_argument("--compare", action="store_true", help="compare with a single process")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("opensmd.modelparallel").setLevel(logging.INFO)

    smp.init(
        {
            "partitions": int(os.environ.get("WORLD_SIZE", "1")),
            "microbatches": args.microbatches,
            "optimize": "speed",
        }
    )
    text = Text(args)
    model = smp.DistributedModel(build(args, len(text.letters)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))

    losses = []
    for inputs, targets in text.batches(0, args.steps):
        optimizer.zero_grad()
        loss = train_step(model, inputs, targets)
        optimizer.step()
        losses.append(loss.reduce_mean().item())
        if smp.rank() == 0 and len(losses) % 10 == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.4f}", flush=True)

    if args.chart:
        chart(args.chart)
    if args.compare and smp.rank() == 0:
        compare(losses, train_alone(args, text))
    smp.barrier()


if __name__ == "__main__":
    main()

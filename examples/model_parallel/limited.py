"""Train a GPT that does not fit into one process, split over processes that may hold no more than that one.

    smdrun -n 4 examples/model_parallel/limited.py
    smdrun -n 4 examples/model_parallel/limited.py --data my_book.txt --width 768 --layers 12 --limit 800

Linux refuses every process more than ``--limit`` MiB beyond what its libraries take. One process without smp
comes first, to show that the model, its gradients and the optimizer are too much for it. Split, no process
ever holds the whole model, not even when it is made: parameters are delayed until it is known who keeps them.
Activation checkpoints keep what a layer computes out of memory until its backward.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
from pathlib import Path

import torch
from gpt import Text, build, loss_of, options, train_alone

import smdistributed.modelparallel.torch as smp

MIB = 2**20


def allow(mebibytes: int) -> None:
    """Have the kernel refuse this process more memory of its own than so much beyond today's."""
    # torch imports some of itself with the first optimizer, and starts threads with the first backward.
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.sum().backward()
    torch.optim.AdamW([parameter]).step()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now = int(fields["VmData"].split()[0]) * 1024  # what RLIMIT_DATA counts; the kernel writes kB
    resource.setrlimit(resource.RLIMIT_DATA, (now + mebibytes * MIB, resource.RLIM_INFINITY))


def alone(args: argparse.Namespace) -> None:
    """The same training without smp, to the end or to the first allocation that is refused."""
    torch.set_num_threads(1)
    text = Text(args)
    allow(args.limit)
    try:
        train_alone(args, text)
        print(f"In one process without smp, {args.limit} MiB are enough", flush=True)
    except RuntimeError as error:
        print(f"In one process without smp: {str(error).splitlines()[0]}", flush=True)


@smp.step
def train_step(model, inputs, targets):
    loss = loss_of(model(inputs), targets)
    model.backward(loss)
    return loss


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--limit", type=int, default=450, help="MiB that a process may hold; default 450")
    parser.set_defaults(width=640, layers=8, steps=6, batch_size=8)
    args = parser.parse_args()

    smp.init(
        {
            "partitions": int(os.environ.get("WORLD_SIZE", "1")),
            "microbatches": args.microbatches,
            "delayed_parameter_initialization": True,
        }
    )
    if smp.rank() == 0:
        process = multiprocessing.get_context("spawn").Process(target=alone, args=(args,))
        process.start()
        process.join()
    smp.barrier()
    text = Text(args)
    allow(args.limit)
    with smp.model_creation():
        net = build(args, len(text.letters))
    size = sum(parameter.numel() for parameter in net.parameters())
    model = smp.DistributedModel(net)
    smp.set_activation_checkpointing(net.blocks.layers, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    for step, (inputs, targets) in enumerate(text.batches(0, args.steps), 1):
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, inputs, targets)
        optimizer.step()
        if smp.rank() == 0 and (step % 2 == 0 or step == args.steps):
            print(f"step {step}: loss {loss.reduce_mean():.4f}", flush=True)
    mine = sum(parameter.numel() for parameter in model.local_parameters())
    held = smp.allgather(mine, smp.PP_GROUP)
    if smp.rank() == 0:
        print(f"Parameters, gradients and Adam's state: {size * 16 / MIB:.0f} MiB, in each process", end=" ")
        print(", ".join(f"{count * 16 / MIB:.0f}" for count in held))


if __name__ == "__main__":
    main()

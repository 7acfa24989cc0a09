"""Split a Hugging Face GPT-2 over processes; the model is the library's own, and so is its loss.

    smdrun -n 2 examples/model_parallel/huggingface.py
    smdrun -n 2 examples/model_parallel/huggingface.py --data my_book.txt --layers 12 --width 768

The model is made from a configuration, small by default, and learns to write character by character. Its
input and output embeddings are one tensor, so both live in the same process.
"""

from __future__ import annotations

import os

import torch
from gpt import CONTEXT, Text, options
from transformers import GPT2Config, GPT2LMHeadModel

import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model, inputs):
    loss = model(input_ids=inputs, labels=inputs).loss
    model.backward(loss)
    return loss


def main() -> None:
    args = options(__doc__).parse_args()
    smp.init(
        {
            "partitions": int(os.environ.get("WORLD_SIZE", "1")),
            "microbatches": args.microbatches,
            "optimize": "speed",
        }
    )
    text = Text(args)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(text.letters),
        n_positions=CONTEXT,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = smp.DistributedModel(GPT2LMHeadModel(config))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    model.train()
    for step, (inputs, _) in enumerate(text.batches(0, args.steps), 1):
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, inputs)
        optimizer.step()
        if smp.rank() == 0 and (step % 10 == 0 or step == args.steps):
            print(f"step {step}: loss {loss.reduce_mean():.4f}", flush=True)
    mine = sum(parameter.numel() for parameter in model.local_parameters())
    counts = smp.allgather(mine, smp.PP_GROUP)
    if smp.rank() == 0:
        print("parameters in each process: " + ", ".join(f"{count:,}" for count in counts))


if __name__ == "__main__":
    main()

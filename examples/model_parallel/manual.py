"""Choose by hand which process each module lives on.

    smdrun -n 2 examples/model_parallel/manual.py
    smdrun -n 2 examples/model_parallel/manual.py --data my_book.txt --width 256

Modules created inside ``with smp.partition(i)`` live in process i, all others in ``default_partition``. Here
the first recurrent layer is on 0, the second on 1, and the output layer on 0 again: data may go to and fro.
"""

from __future__ import annotations

import torch
from gpt import Text, loss_of, options
from torch import nn

import smdistributed.modelparallel.torch as smp


class Writer(nn.Module):
    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(characters, width)
        with smp.partition(0):
            self.first = nn.GRU(width, width, batch_first=True)
        with smp.partition(1):
            self.second = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.first(self.letters(text))
        deeper, _ = self.second(hidden)
        return self.head(hidden + deeper)


@smp.step
def train_step(model, inputs, targets):
    loss = loss_of(model(inputs), targets)
    model.backward(loss)
    return loss


def main() -> None:
    args = options(__doc__).parse_args()
    smp.init(
        {
            "partitions": 2,
            "auto_partition": False,
            "default_partition": 0,
            "microbatches": args.microbatches,
        }
    )
    text = Text(args)
    torch.manual_seed(0)
    model = smp.DistributedModel(Writer(len(text.letters), args.width))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))
    for step, (inputs, targets) in enumerate(text.batches(0, args.steps), 1):
        optimizer.zero_grad()
        loss = train_step(model, inputs, targets)
        optimizer.step()
        if smp.rank() == 0 and (step % 10 == 0 or step == args.steps):
            print(f"step {step}: loss {loss.reduce_mean():.4f}", flush=True)
    names = [name for name, module in model.local_named_modules() if not list(module.children())]
    for rank, local in enumerate(smp.allgather(names, smp.PP_GROUP)):
        if smp.rank() == 0:
            print(f"process {rank} has {', '.join(local)}")


if __name__ == "__main__":
    main()

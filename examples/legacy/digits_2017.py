"""A script as one wrote it in 2017: hand-made gradient averaging and a hand-made ring, on the old API.

    python -m torch.distributed.deprecated.launch --nproc_per_node=2 examples/legacy/digits_2017.py

Nothing in it knows of opensmd, which makes it run on today's PyTorch.
"""

import argparse

import torch
import torch.distributed.deprecated as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.autograd import Variable


def average_gradients(model):
    """Sum the gradients over all processes and divide."""
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.reduce_op.SUM)
        param.grad.data /= size


def ring_sum(tensor):
    """The sum over all processes, sent from neighbour to neighbour."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(size - 1):
        request = dist.isend(passing, (rank + 1) % size)
        received = torch.zeros(*passing.size())
        dist.recv(received, (rank - 1) % size)
        request.wait()
        total += received
        passing = received
    return total


def main():
    """Train on this process's share of the digits; report from rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--backend", default="tcp")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = torch.FloatTensor(digits.data / 16)[rank::size]
    labels = torch.LongTensor(digits.target)[rank::size]
    train = images.size(0) * 4 // 5

    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    steps = 1437 // size // 32  # the same number on every process
    for epoch in range(args.epochs):
        losses = torch.zeros(1)
        for step in range(steps):
            batch = slice(step * 32, (step + 1) * 32)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(Variable(images[batch])), Variable(labels[batch]))
            loss.backward()
            average_gradients(model)
            optimizer.step()
            losses += loss.data
        mean = ring_sum(losses / steps) / size
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item():.3f}")

    right = (model(Variable(images[train:])).data.max(1)[1] == labels[train:]).float().sum()
    counts = torch.FloatTensor([right.item(), images.size(0) - train])
    if rank == 0:
        parts = [torch.zeros(2) for _ in range(size)]
        dist.gather(counts, gather_list=parts)
        total = sum(parts)
        print(f"accuracy on held-out digits: {total[0] / total[1]:.3f}")
    else:
        dist.gather(counts, dst=0)


if __name__ == "__main__":
    main()

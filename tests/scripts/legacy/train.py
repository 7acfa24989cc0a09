"""A training script of 2018, written as its kind was: it must run unchanged."""

import argparse
import sys
import time

import torch
import torch.distributed.deprecated as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel.deprecated import DistributedDataParallelCPU

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--backend", default="tcp")
parser.add_argument("--fail", type=int, default=-1)
parser.add_argument("--place", action="store_true")
args = parser.parse_args()

dist.init_process_group(backend=args.backend, init_method="env://")
if args.fail == dist.get_rank():
    dist.recv(torch.ones(1))  # until the other has joined, too, and can wait to be ended
    raise SystemExit(23)
if args.fail >= 0:
    dist.send(torch.ones(1), args.fail)
    time.sleep(1000)
if args.place:
    total = torch.ones(1)
    dist.all_reduce(total)
    sys.stdout.write(f"rank {dist.get_rank()} local {args.local_rank}: {total.item()}\n")
    raise SystemExit

torch.manual_seed(dist.get_rank())
model = DistributedDataParallelCPU(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(7)
for _ in range(5):
    batch = torch.randn(8, 5, generator=generator)
    part = batch.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer.zero_grad()
    loss = F.mse_loss(model(part[:, :4]), part[:, 4:])
    loss.backward()
    optimizer.step()
weights = torch.cat([p.data.view(-1) for p in model.parameters()])
others = [torch.zeros_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(others, weights)
assert all(torch.equal(other, weights) for other in others)
# one write a line: the processes share a terminal
sys.stdout.write(f"rank {dist.get_rank()} local {args.local_rank}: {weights.sum().item():.6f}\n")

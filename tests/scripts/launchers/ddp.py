"""Data parallelism as users write it: nothing here knows of any launcher."""

import json
import os

import torch
import torch.distributed as dist
from training import STEPS, batch, loss_of, net

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(STEPS):
    optimizer.zero_grad()
    loss = loss_of(model(batch(step)[rank::size]))
    loss.backward()
    optimizer.step()
    mean = loss.detach() / size
    dist.all_reduce(mean)
    losses.append(mean.item())
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "SMDATAPARALLEL_LOCAL_RANK")
found = {name: os.environ.get(name) for name in (*names, "SMDATAPARALLEL_USE_SINGLENODE")}
print("ddp " + json.dumps({"rank": rank, "size": size, "losses": losses, **found}), flush=True)

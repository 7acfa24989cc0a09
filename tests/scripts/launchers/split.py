"""A model in two parts, with replicas where there are more than two ranks."""

import json

import torch
import torch.distributed as dist
from training import STEPS, batch, loss_of, net

import smdistributed.modelparallel.torch as smp

smp.init({"partitions": 2, "microbatches": 2, "ddp": True})
model = smp.DistributedModel(net())
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(rows):
    loss = loss_of(model(rows))
    model.backward(loss)
    return loss


losses = []
for step in range(STEPS):
    optimizer.zero_grad()
    mean = train_step(batch(step)[smp.dp_rank() :: smp.dp_size()]).reduce_mean().detach() / smp.dp_size()
    optimizer.step()
    dist.all_reduce(mean, group=smp.get_dp_process_group())
    losses.append(mean.item())
place = {"local_rank": smp.local_rank(), "local_size": smp.local_size()}
print("split " + json.dumps({"rank": smp.rank(), "size": smp.size(), "losses": losses, **place}), flush=True)
smp.shutdown()

"""A script that leaves the library out in a plain local run, as the documentation says it may."""

import torch

import smdistributed.dataparallel.torch.distributed as dist

model = torch.nn.Linear(2, 1)
if dist.is_available():
    dist.init_process_group()
    value = torch.ones(1) * dist.get_rank()
    dist.all_reduce(value)
    print(f"distributed: rank {dist.get_rank()} of {dist.get_world_size()}, sum {value.item()}")
else:
    print("local:", dist.is_initialized(), model(torch.ones(1, 2)).shape[0])

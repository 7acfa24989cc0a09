# ruff: noqa  - a user's script, written after a container's throughput test
"""Rank and size from mpirun's variables, and a meeting place of the script's own, whatever the launcher says."""

import os

os.environ.setdefault("SMDATAPARALLEL_SERVER_ADDR", "127.0.0.1")
os.environ.setdefault("SMDATAPARALLEL_SERVER_PORT", "7592")
import torch
import torch.distributed as dist

os.environ["MASTER_ADDR"] = os.environ["SMDATAPARALLEL_SERVER_ADDR"]
os.environ["MASTER_PORT"] = str(int(os.environ["SMDATAPARALLEL_SERVER_PORT"]) + 2)

import smdistributed.dataparallel.torch.torch_smddp

world_size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
local_rank = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
dist.init_process_group("smddp", world_size=world_size, rank=rank, store=None, group_name="")
torch.cuda.set_device(local_rank)

x = torch.ones(1 << 18).cuda()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
for _ in range(5):
    dist.all_reduce(x)
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0
dist.barrier(device_ids=[local_rank])
print("sum", x[0].item())
dist.destroy_process_group()

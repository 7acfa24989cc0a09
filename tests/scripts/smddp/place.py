"""Says where it is, as a script started by any launcher would find out."""

import gc
import json
import os

import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

dist.init_process_group("smddp")
total = torch.ones(1)
dist.all_reduce(total)
told = {
    name: os.environ.get(name)
    for name in (
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "SMDATAPARALLEL_LOCAL_RANK",
        "SMDATAPARALLEL_USE_SINGLENODE",
        "OMP_NUM_THREADS",
        "SM_MODEL_DIR",
        "SM_NUM_GPUS",
        "SM_HOSTS",
        "SM_CURRENT_HOST",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
}
told.update(
    rank=dist.get_rank(),
    size=dist.get_world_size(),
    sum=total.item(),
    cpus=sorted(os.sched_getaffinity(0)),
    exempt_from_collections=gc.get_freeze_count(),
)
print("place " + json.dumps(told), flush=True)
dist.barrier()
dist.destroy_process_group()

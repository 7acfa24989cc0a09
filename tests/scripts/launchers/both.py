"""Both scripts in one start of a launcher, which costs more than they do."""

import runpy
from pathlib import Path

import torch.distributed as dist

for name in ("ddp.py", "split.py"):
    runpy.run_path(str(Path(__file__).with_name(name)))
dist.destroy_process_group()

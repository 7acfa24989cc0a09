"""Both scripts in one start of a launcher, which costs more than they do.

Python's collector would take a third of that.
"""

import gc
import runpy
from pathlib import Path

gc.disable()

import torch.distributed as dist  # noqa: E402

for name in ("ddp.py", "split.py"):
    runpy.run_path(str(Path(__file__).with_name(name)))
dist.destroy_process_group()
gc.freeze()

"""What a SageMaker container says to Accelerate and to Trainer: both take smddp for a backend of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.clients.conftest import PATIENCE
from tests.support.ranks import ROOT

SMDRUN = [str(Path(sys.executable).with_name("smdrun")), "-n", "2", "--no-prefix"]
VARIABLES = {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL"}
ACCELERATE = """
import torch
import torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.arange(16.0).view(8, 2), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs in loader:
    accelerator.backward(model(inputs).mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
rows = accelerator.gather(inputs).shape[0]
accelerator.print(dist.get_backend(), accelerator.distributed_type, rows, "rows")
accelerator.end_training()
"""
TRAINER = """
import torch.distributed as dist
from tests.clients.test_transformers import fit

trainer = fit("out", per_device_train_batch_size=4)
if dist.get_rank() == 0:
    print(dist.get_backend(), trainer.args.parallel_mode)
"""


def smdrun(folder: Path, source: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script started by smdrun, in a folder of its own."""
    (folder / "train.py").write_text(source)
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*SMDRUN, *options, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_accelerate_trains_over_smddp_with_the_variables_of_sagemaker(tmp_path: Path) -> None:
    done = smdrun(tmp_path, ACCELERATE, "--device", "cpu", **VARIABLES)
    assert done.returncode == 0, done.stderr
    assert "smddp DistributedType.MULTI_GPU 4 rows" in done.stdout


def test_trainer_trains_over_smddp_with_the_option_of_smdrun(tmp_path: Path) -> None:
    done = smdrun(tmp_path, TRAINER, "--device", "cpu", "--dataparallel")
    assert done.returncode == 0, done.stderr
    assert "smddp ParallelMode.SAGEMAKER_DATA_PARALLEL" in done.stdout

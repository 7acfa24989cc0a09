"""Lightning: DDP over smddp by the backend's name, with its own logging, sampling and checkpoints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.clients.conftest import PATIENCE, Clients
from tests.clients.training import Trained, assert_trains_as_over_gloo, net, rows, trained


def train(backend: str, folder: str) -> Trained:
    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = net(), []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    strategy = DDPStrategy(process_group_backend=backend, cluster_environment=LightningEnvironment())
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, gradient_clip_val=1.0,
        default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model, loader = Regression(), DataLoader(rows(), batch_size=4)
    trainer.fit(model, loader, DataLoader(rows(16), batch_size=4))
    numbers = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    trainer.save_checkpoint(f"{folder}/{backend}.ckpt")
    saved = torch.load(f"{folder}/{backend}.ckpt", weights_only=True)["state_dict"]
    return trained(model.losses, model.net.state_dict(), numbers=numbers, saved=saved)


def test_lightning_trains_validates_and_saves_as_over_gloo(clients: Clients, tmp_path: Path) -> None:
    assert_trains_as_over_gloo(clients("lightning"), train, str(tmp_path))


SCRIPT = """
import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

import smdistributed.dataparallel.torch.torch_smddp

if __name__ == "__main__":
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="smddp"), max_steps=2,
        logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    # in one piece: both ranks write to one pipe
    print(f"{dist.get_backend()} {trainer.world_size} ranks\\n", end="", flush=True)
"""


def test_lightning_starts_its_ranks_itself_although_the_script_imports_the_library(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("smddp 2 ranks") == 2

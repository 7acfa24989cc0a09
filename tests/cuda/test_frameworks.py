"""Libraries that train on CUDA over smddp come to what they come to over NCCL itself.

Each rank is as on a host of one GPU, so that it takes the first one there is, whichever rank it is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, DistributedSampler

from tests.clients.training import LEAST_STEPS, net, rows
from tests.cuda.test_collectives import Gpus
from tests.support.cuda import DEVICE, MAPPED

Found = dict[str, Any]


def on_own_host(train: Callable[[str], Found], backend: str, folder: str) -> Found:
    """On a rank: what ``train`` finds, on the CPU, for the test's process."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    places = {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": rank,
        "GROUP_RANK": rank,
        "NNODES": size,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in places.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        hide_what_is_broken()
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

        found = train(backend)
    for tensor in found["weights"].values():
        assert tensor.device.type == DEVICE
    return tree_map(lambda one: one.detach().cpu() if isinstance(one, torch.Tensor) else one, found)


def hide_what_is_broken() -> None:
    """Let libraries take for missing what was built for another torch: they import whatever is installed."""
    broken = [name for name in ("torchvision", "torchaudio") if not works(name)]
    version = importlib.metadata.version

    def of_what_works(name: str) -> str:
        if name in broken:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    importlib.metadata.version = of_what_works
    sys.modules.update(dict.fromkeys(broken))  # type: ignore[arg-type]


def needs(library: str) -> None:
    """Skip where it is not installed; importing it here would take as long as on a rank."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def works(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # of any kind, by what its own code was compiled for
        return False
    return True


def assert_trains_as_over_nccl(gpus: Gpus, folder: object, train: Callable[[str], Found]) -> None:
    over_nccl, over_smddp = (
        gpus(2).run(on_own_host, train, backend, str(folder), backend=None, timeout=100)
        for backend in ("nccl", "smddp")
    )
    for expected, found in zip(over_nccl, over_smddp, strict=True):
        assert found.pop("backend") == "smddp"
        assert expected.pop("backend") == ("smddp" if MAPPED else "nccl")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(over_smddp[0]["weights"], over_smddp[1]["weights"])
    losses = over_smddp[0]["losses"]
    assert len(losses) >= LEAST_STEPS
    assert sum(losses[-2:]) < sum(losses[:2]), "it has not learned anything"


def with_accelerate(backend: str) -> Found:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    dist.init_process_group(backend)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="no")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), batch_size=4))
    losses, seen = [], []
    for epoch in range(2):
        for inputs, targets in loader:
            assert inputs.device.type == DEVICE
            with accelerator.accumulate(model):
                loss = functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(accelerator.gather_for_metrics(targets).sum())
            losses.append(accelerator.gather(loss).mean().item())
        if epoch == 0:
            accelerator.wait_for_everyone()
            accelerator.save_state(f"accelerate-{backend}")
    weights = {name: one.clone() for name, one in accelerator.unwrap_model(model).state_dict().items()}
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0], device="cuda"), "sum")
    accelerator.load_state(f"accelerate-{backend}")
    resumed = accelerator.unwrap_model(model)[0].weight.detach().clone()
    used = dist.get_backend()
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    return {
        "backend": used,
        "losses": losses,
        "weights": weights,
        "seen": seen,
        "total": total,
        "resumed": resumed,
    }


def test_accelerate_trains_gathers_and_resumes_on_cuda(gpus: Gpus, tmp_path: object) -> None:
    needs("accelerate")
    assert_trains_as_over_nccl(gpus, tmp_path, with_accelerate)


def with_trainer(backend: str) -> Found:
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    from tests.clients.test_transformers import gpt2, losses_of, sentences

    dist.init_process_group(backend)
    arguments = TrainingArguments(
        f"trainer-{backend}",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
    )
    lines = sentences()
    trainer = Trainer(model=gpt2(), args=arguments, train_dataset=lines, eval_dataset=lines[:8])
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    weights = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    found = {"backend": dist.get_backend(), "losses": losses_of(trainer), "weights": weights}
    dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    return {**found, "evaluated": evaluated}


def test_trainer_trains_and_evaluates_on_cuda(gpus: Gpus, tmp_path: object) -> None:
    needs("transformers")
    needs("accelerate")
    assert_trains_as_over_nccl(gpus, tmp_path, with_trainer)


def with_lightning(backend: str) -> Found:
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

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    strategy = DDPStrategy(process_group_backend=backend, cluster_environment=LightningEnvironment())
    trainer = lightning.Trainer(
        accelerator="cuda", devices=1, num_nodes=2, strategy=strategy, max_epochs=2, gradient_clip_val=1.0,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    model = Regression()
    weights: dict[str, torch.Tensor] = {}
    model.on_train_end = lambda: weights.update(  # before the strategy takes the model to the CPU
        {name: one.clone() for name, one in model.net.state_dict().items()}
    )
    trainer.fit(model, DataLoader(rows(), batch_size=4))
    numbers = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    used = dist.get_backend()
    dist.destroy_process_group()
    return {"backend": used, "losses": model.losses, "weights": weights, "numbers": numbers}


def test_lightning_trains_on_cuda(gpus: Gpus, tmp_path: object) -> None:
    needs("lightning")
    assert_trains_as_over_nccl(gpus, tmp_path, with_lightning)


def with_torchmetrics(backend: str) -> Found:
    from torchmetrics import MeanSquaredError, MetricCollection, R2Score
    from torchmetrics.classification import BinaryAUROC

    dist.init_process_group(backend)
    data = rows(64)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), pin_memory=True)
    model = nn.parallel.DistributedDataParallel(net().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    summed = MetricCollection({"mse": MeanSquaredError(), "r2": R2Score(multioutput="raw_values")}).cuda()
    gathered = BinaryAUROC().cuda()
    losses, steps = [], []
    for rows_of_batch in loader:
        inputs, targets = (one.cuda(non_blocking=True) for one in rows_of_batch)
        output = model(inputs)
        loss = functional.mse_loss(output, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        steps.append(summed(output.detach(), targets)["mse"])
        for part in range(dist.get_rank() + 1):  # ranks gather lists of different lengths
            gathered.update(output[part:, 0].detach().sigmoid(), (targets[part:, 0] > 0).int())
    weights = {name: one.clone() for name, one in model.module.state_dict().items()}
    found = {**summed.compute(), "auroc": gathered.compute(), "backend": dist.get_backend()}
    dist.destroy_process_group()
    return {"losses": losses, "weights": weights, "steps": steps, **found}


def test_torchmetrics_sums_and_gathers_on_cuda(gpus: Gpus, tmp_path: object) -> None:
    needs("torchmetrics")
    assert_trains_as_over_nccl(gpus, tmp_path, with_torchmetrics)

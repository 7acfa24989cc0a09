"""Ray Train: its workers are started by Ray, and make the group from the backend's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.clients.training import Trained, assert_trained_alike, net, rows, trained
from tests.support.ranks import ROOT

WORKERS = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray on this machine; workers import this folder."""
    import ray

    ray.init(
        num_cpus=WORKERS + 1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


def work(settings: dict[str, Any]) -> None:
    """On a worker: train, and leave what came of it in the test's folder."""
    import ray.train
    import ray.train.torch

    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(net())
    loader = ray.train.torch.prepare_data_loader(DataLoader(rows(), batch_size=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ray.train.report({"loss": losses[-1]})
    rank = ray.train.get_context().get_world_rank()
    torch.save(trained(losses, model.module.state_dict()), f"{settings['folder']}/{rank}.pt")


def train(backend: str, folder: Path) -> list[Trained]:
    """What two workers have trained over a backend."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    (folder / backend).mkdir()
    TorchTrainer(
        work,
        train_loop_config={"folder": str(folder / backend)},
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(name=backend, storage_path=str(folder)),
    ).fit()
    return [torch.load(folder / backend / f"{rank}.pt", weights_only=False) for rank in range(WORKERS)]


@pytest.mark.usefixtures("cluster")
def test_ray_train_takes_the_backend_by_its_name_and_trains_as_over_gloo(tmp_path: Path) -> None:
    assert_trained_alike(train("gloo", tmp_path), train("smddp", tmp_path))

"""Ray Train: its workers are started by Ray on two nodes, and make the group from the backend's name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader

from opensmd.collectives.mailbox import spans_hosts
from tests.clients.training import Trained, assert_trained_alike, net, rows, trained
from tests.scripts.launchers import training as launched
from tests.support.ranks import ROOT

WORKERS = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray on this machine as on two nodes, which are different hosts to smddp; workers import this folder."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    for node in range(2):
        nodes.add_node(num_cpus=2, include_dashboard=False, env_vars={"OPENSMD_HOST_ID": f"node {node}"})
    ray.init(
        address=nodes.address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()
    nodes.shutdown()


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
    if dist.get_backend() == "smddp":
        node = ray.get_runtime_context().get_node_id()
        said = {"node": node, "over hosts": spans_hosts(), "split": split_losses()}
        Path(settings["folder"], f"{rank}.json").write_text(json.dumps(said))


def split_losses() -> list[float]:
    """Of the conformance test's model in two parts, one on each node."""
    import smdistributed.modelparallel.torch as smp

    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # by addresses, of which these nodes have one together
        os.environ.pop(name)
    smp.init({"partitions": WORKERS, "microbatches": 2})
    model = smp.DistributedModel(launched.net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(rows: torch.Tensor) -> torch.Tensor:
        loss = launched.loss_of(model(rows))
        model.backward(loss)
        return loss

    losses = []
    for step in range(launched.STEPS):
        optimizer.zero_grad()
        losses.append(train_step(launched.batch(step)).reduce_mean().item())
        optimizer.step()
    smp.shutdown()
    return losses


def train(backend: str, folder: Path) -> list[Trained]:
    """What two workers have trained over a backend."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    (folder / backend).mkdir()
    TorchTrainer(
        work,
        train_loop_config={"folder": str(folder / backend)},
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=WORKERS, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(name=backend, storage_path=str(folder)),
    ).fit()
    return [torch.load(folder / backend / f"{rank}.pt", weights_only=False) for rank in range(WORKERS)]


@pytest.mark.usefixtures("cluster")
def test_ray_train_takes_the_backend_by_its_name_and_trains_as_over_gloo(tmp_path: Path) -> None:
    assert_trained_alike(train("gloo", tmp_path), train("smddp", tmp_path))
    said = [json.loads((tmp_path / "smddp" / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    assert len({rank["node"] for rank in said}) == WORKERS
    for rank in said:
        assert rank["over hosts"]
        assert rank["split"] == pytest.approx(launched.expected(), rel=1e-5)

"""Hugging Face Accelerate: prepare, accumulate, clip, gather, save and load."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.clients.conftest import Clients
from tests.clients.training import Trained, assert_trains_as_over_gloo, net, rows, trained


def train(backend: str, folder: str) -> Trained:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), batch_size=4))
    losses, seen = [], []
    for epoch in range(2):
        for inputs, targets in loader:
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
            accelerator.save_state(f"{folder}/{backend}")
    weights = accelerator.unwrap_model(model).state_dict()
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum")
    result = trained(losses, weights, seen=torch.stack(seen), total=total)
    accelerator.load_state(f"{folder}/{backend}")
    result.found["resumed"] = accelerator.unwrap_model(model)[0].weight.detach().clone()
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    return result


@pytest.mark.parametrize("version", ["1.15.0", "1.11.0"])
def test_accelerate_trains_gathers_and_resumes_as_over_gloo(
    version: str, clients: Clients, tmp_path: object
) -> None:
    assert_trains_as_over_gloo(clients("accelerate", version), train, str(tmp_path))


def unwrap(settings: dict[str, bool]) -> None:
    """Of a split model, and of each level between it and the user's module."""
    from accelerate.utils import extract_model_from_parallel

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, **settings})
    model = smp.DistributedModel(net())
    for level in (model, model.module, model.module.module):
        assert extract_model_from_parallel(level, recursive=True) is model.get_module()
    smp.shutdown()


@pytest.mark.parametrize("settings", [{}, {"fp16": True}], ids=["fp32", "fp16"])
def test_accelerate_unwraps_a_split_model_to_the_users_module(
    settings: dict[str, bool], clients: Clients
) -> None:
    clients("accelerate")(unwrap, settings)

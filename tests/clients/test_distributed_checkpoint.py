"""torch's distributed checkpoint with FSDP2: every rank writes its shards, and reads them back."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.clients.conftest import Clients
from tests.clients.training import Trained, assert_trains_as_over_gloo, net, rows, trained


def train(backend: str, folder: str) -> Trained:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (2,))

    def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.02)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        inputs, targets = (part.chunk(2)[dist.get_rank()] for part in rows().tensors)
        losses = []
        for _ in range(4):
            loss = functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = sharded()
    losses = steps(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{backend}")
    # a thread saves while this one trains: the two need a group each
    aside = dist.new_group(backend=backend)
    later = dcp.async_save({"model": weights}, checkpoint_id=f"{folder}/{backend}-async", process_group=aside)

    model, optimizer = sharded()
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{backend}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    losses += steps(model, optimizer)
    later.result()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    whole = whole if dist.get_rank() == 0 else {}
    shared = [whole]
    dist.broadcast_object_list(shared)
    result = trained(losses, shared[0])
    dist.destroy_process_group()
    return result


def test_sharded_models_save_and_resume_as_over_gloo(clients: Clients, tmp_path: Path) -> None:
    assert_trains_as_over_gloo(clients("torch"), train, str(tmp_path))

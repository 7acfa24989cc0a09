"""DeepSpeed's ZeRO-1 over a group that the script has made."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from tests.clients.conftest import Clients
from tests.clients.training import Trained, assert_trains_as_over_gloo, net, rows, trained

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def train(backend: str) -> Trained:
    import deepspeed

    # its own kernels for shared memory, which it would compile for a minute, serve inference only
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group(backend)
    model = net()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        config=CONFIG,
        dist_init_required=False,
    )
    inputs, targets = (part.chunk(2)[dist.get_rank()] for part in rows().tensors)
    losses = []
    for _ in range(2):
        for x, y in zip(inputs.split(4), targets.split(4), strict=True):
            loss = functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    result = trained(losses, engine.module.state_dict())
    engine.destroy()
    dist.destroy_process_group()
    return result


def test_zero_stage_1_trains_as_over_gloo(clients: Clients) -> None:
    assert_trains_as_over_gloo(clients("deepspeed", fresh=True), train)

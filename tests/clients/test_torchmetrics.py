"""torchmetrics: states that are summed or gathered over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

from tests.clients.conftest import Clients
from tests.clients.training import Trained, assert_trains_as_over_gloo, net, rows, trained


def train(backend: str) -> Trained:
    from torchmetrics import MeanSquaredError, MetricCollection, R2Score
    from torchmetrics.classification import BinaryAUROC
    from torchmetrics.text import Perplexity

    dist.init_process_group(backend)
    data = rows(64)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    summed = MetricCollection({"mse": MeanSquaredError(), "r2": R2Score(multioutput="raw_values")})
    gathered, perplexity = BinaryAUROC(), Perplexity()
    losses, steps = [], []
    for inputs, targets in loader:
        output = model(inputs)
        loss = functional.mse_loss(output, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        steps.append(summed(output.detach(), targets)["mse"])
        # ranks gather lists of different lengths
        for part in range(dist.get_rank() + 1):
            gathered.update(output[part:, 0].detach().sigmoid(), (targets[part:, 0] > 0).int())
        perplexity.update(output.detach()[None], (targets[None, :, 0] > 0).long())
    found = {**summed.compute(), "auroc": gathered.compute(), "perplexity": perplexity.compute()}
    result = trained(losses, model.module.state_dict(), steps=steps, **found)
    dist.destroy_process_group()
    return result


def test_torchmetrics_sums_and_gathers_as_over_gloo(clients: Clients) -> None:
    assert_trains_as_over_gloo(clients("torchmetrics"), train)

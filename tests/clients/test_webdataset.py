"""webdataset: shards divided among ranks and their workers, which are forks of a process that has a group."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.clients.conftest import Clients
from tests.clients.training import Trained, assert_trains_as_over_gloo, net, rows, trained

SHARDS = 4


def write_shards(folder: Path) -> None:
    """The rows as tar files, the format of webdataset."""
    parts = [part.chunk(SHARDS) for part in rows().tensors]
    for shard, (inputs, targets) in enumerate(zip(*parts, strict=True)):
        with tarfile.open(folder / f"rows-{shard}.tar", "w") as archive:
            for number, row in enumerate(zip(inputs, targets, strict=True)):
                for kind, tensor in zip(("x.pth", "y.pth"), row, strict=True):
                    data = io.BytesIO()
                    torch.save(tensor.clone(), data)
                    entry = tarfile.TarInfo(f"{shard}{number:03}.{kind}")
                    entry.size = data.tell()
                    data.seek(0)
                    archive.addfile(entry, data)


def train(backend: str, folder: str) -> Trained:
    import webdataset

    dist.init_process_group(backend)
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    shards = f"{folder}/rows-{{0..{SHARDS - 1}}}.tar"
    data = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=webdataset.split_by_node)
    batches = data.decode().to_tuple("x.pth", "y.pth").batched(4)
    losses, seen = [], []
    for _ in range(2):
        for inputs, targets in webdataset.WebLoader(batches, batch_size=None, num_workers=2):
            loss = functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen.append(inputs)
    everything = torch.cat(seen)
    both = [torch.empty_like(everything) for _ in range(2)]
    dist.all_gather(both, everything)
    order = torch.cat(both).flatten().sort().values
    result = trained(losses, model.module.state_dict(), all_rows=order)
    dist.destroy_process_group()
    return result


def test_webdataset_with_workers_trains_as_over_gloo(clients: Clients, tmp_path: Path) -> None:
    write_shards(tmp_path)
    assert_trains_as_over_gloo(clients("webdataset"), train, str(tmp_path))

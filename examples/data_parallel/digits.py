"""A convolutional net on handwritten digits, trained by as many processes as you like.

    smdrun -n 2 examples/data_parallel/digits.py
    smdrun -n 2 examples/data_parallel/digits.py --data my_images.npz --epochs 20 --resume

Without ``--data``: the 1,797 digits that scikit-learn ships. Your own: see ``images.py``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from images import load_images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  # registers the backend "smddp"


def make_model(channels: int, classes: int) -> nn.Module:
    """Three convolutions; takes images of any size."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 4, classes),
    )


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of right answers; every rank looks at its part, the counts are summed."""
    model.eval()
    images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in data.tensors)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    counts = torch.stack([right, torch.tensor(len(labels))])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="smddp", help="smddp or gloo")
    parser.add_argument("--data", type=Path, help=".npz, .csv or a folder of images; see images.py")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, all ranks together")
    parser.add_argument("--checkpoint", type=Path, default=Path("out/digits.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    run(args)  # returns, and frees what holds the group, before the group is destroyed
    dist.destroy_process_group()


def run(args: argparse.Namespace) -> None:
    """Train, save, and say how good the model is on what it was not trained on."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test, classes = load_images(args.data)
    model = make_model(train.tensors[0].shape[1], classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first_epoch = 0
    if args.resume:
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"] + 1
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(train, num_replicas=world_size, rank=rank, seed=0)
    loader = DataLoader(train, batch_size=max(1, args.batch_size // world_size), sampler=sampler)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        total, start = torch.zeros(()), time.perf_counter()
        for images, labels in tqdm(loader, desc=f"epoch {epoch + 1}", disable=rank != 0, leave=False):
            loss = nn.functional.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        seconds = time.perf_counter() - start
        if rank == 0:
            mean = float(total) / len(loader) / world_size
            print(f"epoch {epoch + 1}: loss {mean:.4f}, {len(train) / seconds:,.0f} images/s", flush=True)
            args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, args.checkpoint)
    score = accuracy(model, test)
    if rank == 0:
        print(f"accuracy on {len(test)} images not trained on: {score:.2%}; saved {args.checkpoint}")


if __name__ == "__main__":
    main()

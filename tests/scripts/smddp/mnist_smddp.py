# ruff: noqa  - a user's script, written as SageMaker's examples are
"""The documented script, whole: the smddp backend of torch.distributed, LOCAL_RANK passed on as text."""

import argparse
import os

import torch
import torch.nn.functional as F

# SageMaker data parallel: Import PyTorch's distributed API
import torch.distributed as dist
from digits import Net, datasets
from torch import optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR

# SageMaker data parallel: Import the library PyTorch API
import smdistributed.dataparallel.torch.torch_smddp

# SageMaker data parallel: Initialize the process group
dist.init_process_group(backend="smddp")


def train(model, device, loader, optimizer, scaler):
    model.train()
    for data, target in loader:
        data, target = data.to(device, non_blocking=True), target.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.amp.autocast():
            loss = F.nll_loss(model(data).float(), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.synchronize()


def test(model, device, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            correct += (model(data).argmax(1) == target).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.cuda.manual_seed(1)
    batch_size = args.batch_size

    # SageMaker data parallel: Scale batch size by world size
    batch_size //= dist.get_world_size()
    batch_size = max(batch_size, 1)

    train_dataset, test_dataset = datasets()
    # SageMaker data parallel: Set num_replicas and rank in DistributedSampler
    train_sampler = torch.utils.data.distributed.DistributedSampler(
        train_dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank()
    )
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size, sampler=train_sampler)
    test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=256)

    device = torch.device("cuda")
    # SageMaker data parallel: Wrap the PyTorch model with the library's DDP
    model = DDP(Net().to(device))
    # SageMaker data parallel: Pin each GPU to a single library process.
    local_rank = os.environ["LOCAL_RANK"]
    torch.cuda.set_device(local_rank)
    model.cuda(local_rank)

    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    scaler = torch.cuda.amp.GradScaler()
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(model, device, train_loader, optimizer, scaler)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} accuracy {test(model, device, test_loader):.3f}")
        scheduler.step()
    torch.cuda.empty_cache()

    # SageMaker data parallel: Save model on master node.
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), os.path.join(os.environ["SM_MODEL_DIR"], "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

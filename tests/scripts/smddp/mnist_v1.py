# ruff: noqa  - a user's script, written as SageMaker's examples are
"""The documented v1 script, whole: wrap, then set_device, then model.cuda; CUDA is hard-coded."""

import argparse
import os

import torch
import torch.nn.functional as F
from digits import Net, datasets
from torch import optim
from torch.optim.lr_scheduler import StepLR

# Import distributed data parallel library PyTorch API
import smdistributed.dataparallel.torch.distributed as dist

# Import distributed data parallel library PyTorch DDP
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

# Initialize distributed data parallel library
dist.init_process_group()


class CUDANotFoundException(Exception):
    pass


def train(model, device, loader, optimizer):
    model.train()
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    return loss


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
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise CUDANotFoundException("Must run smdistributed.dataparallel on CUDA-capable devices.")
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed(args.seed)

    rank, local_rank, world_size = dist.get_rank(), dist.get_local_rank(), dist.get_world_size()
    # Scale batch size by world size; the example's `world_size // 8` is 0 below 8 processes
    batch_size = max(args.batch_size // max(world_size // 8, 1), 1)

    train_dataset, test_dataset = datasets()
    train_sampler = torch.utils.data.distributed.DistributedSampler(
        train_dataset, num_replicas=world_size, rank=rank
    )
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=batch_size, shuffle=False, pin_memory=True, sampler=train_sampler
    )
    test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=256)

    device = torch.device("cuda")
    # Wrap the PyTorch model with distributed data parallel library's DDP
    model = DDP(Net(norm=True).to(device))
    # Pin each GPU to a single distributed data parallel library process.
    torch.cuda.set_device(local_rank)
    model.cuda(local_rank)

    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(model, device, train_loader, optimizer)
        if rank == 0:
            print(f"epoch {epoch} accuracy {test(model, device, test_loader):.3f}")
        scheduler.step()

    checksum = sum(parameter.detach().double().sum() for parameter in model.module.parameters())
    everyone = [torch.zeros_like(checksum) for _ in range(world_size)]
    dist.all_gather(everyone, checksum)
    print(f"same model on all ranks: {len({one.item() for one in everyone}) == 1}")
    # Save model on master node.
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), os.path.join(args.model_dir, "model.pt"))
        print("saved", os.environ["SM_MODEL_DIR"])
    dist.barrier()


if __name__ == "__main__":
    main()

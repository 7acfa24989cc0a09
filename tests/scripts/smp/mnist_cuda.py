# ruff: noqa  - a user's script, written after a container's MNIST test: CUDA is hard-coded, steps are guarded
import argparse
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.cuda.amp import autocast
from torch.optim.lr_scheduler import StepLR

import smdistributed.modelparallel.torch as smp


class Net1(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)

    def forward(self, x):
        return torch.flatten(F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2), 1)


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(576, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class GroupedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.net2 = Net1(), Net2()

    def forward(self, x):
        return F.log_softmax(self.net2(self.net1(x)), 1)


@smp.step
def train_step(args, model, scaler, data, target):
    with autocast(bool(args.amp)):
        output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    scaled_loss = scaler.scale(loss) if args.amp else loss
    model.backward(scaled_loss)
    return output, loss


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    pred = output.argmax(dim=1, keepdim=True)
    return loss, pred.eq(target.view_as(pred)).sum().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", type=int, default=0)
    parser.add_argument("--compile", type=int, default=0)
    parser.add_argument("--mp_parameters", type=str, default="")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise ValueError("The script requires CUDA support, but CUDA not available")
    torch.manual_seed(1)
    torch.cuda.manual_seed(1)
    smp.init()
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    pattern, y = (
        torch.randn(10, 1, 16, 16, generator=generator),
        torch.randint(10, (256,), generator=generator),
    )
    x = pattern[y] + 0.3 * torch.randn(256, 1, 16, 16, generator=generator)
    mine = slice(smp.dp_rank(), 256, smp.dp_size())
    dataset = torch.utils.data.TensorDataset(x[mine], y[mine])
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, pin_memory=True, drop_last=True)

    model = GroupedNet()
    if args.compile:
        model = torch.compile(model, backend="eager")
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    model = smp.DistributedModel(model)
    scaler = smp.amp.GradScaler()
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(2):
        model.train()
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            _, loss_mb = train_step(args, model, scaler, data, target)
            if len(list(model.local_parameters())) > 0:
                if args.amp:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
        if smp.rank() == 0:
            print("epoch %d loss %.4f" % (epoch, loss_mb.reduce_mean().item()), flush=True)
        scheduler.step()
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            loss_batch, correct_batch = test_step(model, data.to(device), target.to(device))
            test_loss += sum(loss_batch)
            correct += sum(correct_batch)
    losses = smp.allgather(test_loss, smp.MP_GROUP)
    assert all(math.isclose(loss, losses[0]) for loss in losses)
    if smp.mp_rank() == 0:
        print("accuracy %.3f" % (correct / len(dataset)), flush=True)


if __name__ == "__main__":
    main()

"""A script as users write it after the MNIST example: strict about nothing but the interface."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim

import smdistributed.modelparallel.torch as smp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 10)

    def forward(self, x):
        return F.log_softmax(self.second(self.norm(F.relu(self.first(x)))), 1)


@smp.step
def train_step(model, scaler, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(scaler.scale(loss) if scaler is not None else loss)
    return output, loss


@smp.step()
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    correct = output.argmax(1).eq(target).sum().item()
    return loss, correct


def batches(count, size):
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(10, 64, generator=generator)
    for _ in range(count):
        target = torch.randint(10, (size,), generator=generator)
        yield pattern[target] + 0.3 * torch.randn(size, 64, generator=generator), target


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mp_parameters", default="")
    parser.add_argument("--save")
    parser.add_argument("--resume")
    args = parser.parse_args()
    smp.init({"partitions": 1, "ddp": True, "microbatches": 2})
    torch.manual_seed(1)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    model = smp.DistributedModel(model)
    scheduler = optim.lr_scheduler.StepLR(smp.DistributedOptimizer(optimizer), step_size=8, gamma=0.7)
    optimizer = scheduler.optimizer
    scaler = smp.amp.GradScaler(init_scale=16.0)
    if args.resume:
        found = smp.load(args.resume, partial=True)
        model.load_state_dict(found["model_state_dict"])
        optimizer.load_state_dict(found["optimizer_state_dict"])
    model.train()
    per_rank = 16 // smp.dp_size()
    for data, target in batches(8, 16):
        mine = slice(smp.dp_rank() * per_rank, (smp.dp_rank() + 1) * per_rank)
        optimizer.zero_grad(set_to_none=True)
        _, loss_mb = train_step(model, scaler, data[mine], target[mine])
        if len(list(model.local_parameters())) > 0:
            scaler.step(optimizer)
            scaler.update()
        loss = loss_mb.reduce_mean()
        torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
        if smp.rank() == 0:
            print(f"loss {loss.item() / smp.dp_size():.6f}", flush=True)
        scheduler.step()
    model.eval()
    with torch.no_grad():
        total = correct = 0
        for data, target in batches(2, 16):
            losses, corrects = test_step(model, data, target)
            total, correct = total + sum(losses), correct + sum(corrects)
    assert len({round(one, 4) for one in smp.allgather(total, smp.DP_GROUP)}) == 1
    if smp.mp_rank() == 0 and smp.dp_rank() == 0:
        print(f"correct {correct}/32")
    if args.save:
        if smp.dp_rank() == 0:
            state = {
                "model_state_dict": model.local_state_dict(),
                "optimizer_state_dict": optimizer.local_state_dict(),
            }
            smp.save(state, args.save, partial=True)
            full = model.state_dict()
            smp.save({"model_state_dict": full}, args.save + "_full", partial=False)
            assert Path(f"{args.save}_{smp.mp_rank()}").exists()
        smp.barrier()


if __name__ == "__main__":
    main()

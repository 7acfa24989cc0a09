# ruff: noqa  - a user's script, written after PyTorch's tutorial of 2017
"""Processes that the script forks itself; messages, a ring, a group, and training over ``group=0``."""

import os
import sys
from random import Random

import torch
import torch.distributed.deprecated as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.autograd import Variable
from torch.multiprocessing import Process


class DataPartitioner(object):
    def __init__(self, data, sizes, seed=1234):
        self.data, self.partitions = data, []
        indexes = list(range(len(data)))
        Random(seed).shuffle(indexes)
        for frac in sizes:
            part_len = int(frac * len(data))
            self.partitions.append(indexes[:part_len])
            indexes = indexes[part_len:]

    def use(self, partition):
        return torch.utils.data.Subset(self.data, self.partitions[partition])


def run_p2p(rank, size):
    tensor = torch.zeros(1)
    req = None
    if rank == 0:
        tensor += 1
        req = dist.isend(tensor=tensor, dst=1)
    elif rank == 1:
        req = dist.irecv(tensor=tensor, src=0)
    if req is not None:
        req.wait()
        assert req.is_completed() and tensor[0] == 1


def run_group(rank, size):
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.reduce_op.SUM, group=group)
    assert tensor[0] == (2 if rank < 2 else 1)


def gather(tensor, rank, tensor_list=None, root=0, group=None):
    if group is None:
        group = dist.group.WORLD
    if rank == root:
        assert tensor_list is not None
        dist.gather(tensor, gather_list=tensor_list, group=group)
    else:
        dist.gather(tensor, dst=root, group=group)


def allreduce(send, recv):
    """Implementation of a ring-reduce."""
    rank, size = dist.get_rank(), dist.get_world_size()
    send_buff, recv_buff, accum = send.clone(), torch.zeros(send.size()), send.clone()
    left, right = ((rank - 1) + size) % size, (rank + 1) % size
    for i in range(size - 1):
        there, here = (send_buff, recv_buff) if i % 2 == 0 else (recv_buff, send_buff)
        send_req = dist.isend(there, right)
        dist.recv(here, left)
        accum += here
        send_req.wait()
    recv[:] = accum[:]


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.reduce_op.SUM, group=0)
        param.grad.data /= size


def train(rank, size):
    generator = torch.Generator().manual_seed(0)
    pattern, target = torch.randn(10, 64, generator=generator), torch.randint(10, (256,), generator=generator)
    data = pattern[target] + 0.3 * torch.randn(256, 64, generator=generator)
    part = DataPartitioner(list(zip(data, target)), [1.0 / size] * size).use(rank)
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10), nn.LogSoftmax(1))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for epoch in range(4):
        epoch_loss = 0.0
        for data, target in torch.utils.data.DataLoader(part, batch_size=128 // size, shuffle=True):
            data, target = Variable(data), Variable(target)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
    checksum = sum(parameter.double().sum() for parameter in model.parameters()).item()
    print("Rank %d loss %.3f checksum %.9f" % (rank, epoch_loss / 2, checksum), flush=True)


def run(rank, size):
    torch.set_num_threads(1)
    run_p2p(rank, size)
    run_group(rank, size)
    given, reduced = torch.arange(3.0) + rank, torch.zeros(3)
    allreduce(given, reduced)
    assert reduced.tolist() == [size * i + size * (size - 1) / 2 for i in range(3)]
    found = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
    gather(torch.ones(1) * rank, rank, found)
    assert rank > 0 or [item.item() for item in found] == list(range(size))
    train(rank, size)


def init_processes(rank, size, fn, backend):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = sys.argv[2]
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)


if __name__ == "__main__":
    size = int(sys.argv[1])
    processes = [Process(target=init_processes, args=(rank, size, run, "tcp")) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(sum(process.exitcode != 0 for process in processes))

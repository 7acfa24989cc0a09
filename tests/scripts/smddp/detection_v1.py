# ruff: noqa  - a user's script, written as detection code bases wrote theirs for v1
"""Helpers around the v1 interface: losses reduced by name, predictions gathered as pickled bytes."""

import pickle

import torch

import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

if not dist.is_initialized():
    dist.init_process_group()


def get_world_size():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def get_rank():
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def synchronize():
    if get_world_size() > 1:
        dist.barrier()


def reduce_loss_dict(loss_dict):
    with torch.no_grad():
        names = sorted(loss_dict)
        losses = torch.stack([loss_dict[name] for name in names])
        dist.all_reduce(losses)
        return dict(zip(names, losses / get_world_size()))


def all_gather(data):
    buffer = pickle.dumps(data)
    tensor = torch.ByteTensor(list(buffer)).to("cuda")
    local_size = torch.LongTensor([tensor.numel()]).to("cuda")
    size_list = [torch.LongTensor([0]).to("cuda") for _ in range(get_world_size())]
    dist.all_gather(size_list, local_size)
    max_size = max(int(size.item()) for size in size_list)
    tensor_list = [torch.ByteTensor(size=(max_size,)).to("cuda") for _ in size_list]
    if local_size != max_size:
        tensor = torch.cat((tensor, torch.ByteTensor(size=(max_size - local_size,)).to("cuda")))
    dist.all_gather(tensor_list, tensor)
    return [pickle.loads(t.cpu().numpy().tobytes()[:size]) for size, t in zip(size_list, tensor_list)]


class Detector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16)
        self.classes, self.mask = torch.nn.Linear(16, 4), torch.nn.Linear(16, 2)

    def forward(self, images, targets):
        features = torch.relu(self.norm(self.body(images)))
        classes = torch.nn.functional.cross_entropy(self.classes(features), targets)
        return {"classes": classes, "mask": self.mask(features).square().mean()}


torch.manual_seed(3)
local_rank = dist.get_local_rank()
torch.cuda.set_device(local_rank)
model = Detector().to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * get_world_size())
model = DDP(model, device_ids=[local_rank], broadcast_buffers=False)
generator = torch.Generator().manual_seed(get_rank())
for iteration in range(4):
    images = torch.randn(6, 8, generator=generator).to("cuda")
    targets = torch.randint(4, (6,), generator=generator).to("cuda")
    loss_dict = model(images, targets)
    reduced = reduce_loss_dict(loss_dict)
    optimizer.zero_grad()
    sum(loss_dict.values()).backward()
    optimizer.step()
synchronize()
found = all_gather(
    {"rank": get_rank(), "boxes": ["x" * 7] * get_rank(), "losses": {k: v.item() for k, v in reduced.items()}}
)
assert [item["rank"] for item in found] == list(range(get_world_size()))
assert all(item["losses"] == found[0]["losses"] for item in found)
checksum = sum(parameter.double().sum() for parameter in model.parameters()).detach()
lowest = checksum.clone()
dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
print("same model:", bool(lowest == checksum))

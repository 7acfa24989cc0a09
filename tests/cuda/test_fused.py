"""The optimizers and the layer norm that scripts know from apex, on CUDA."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import smdistributed.modelparallel.torch as smp
from opensmd.optim.norm import global_norm
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad
from tests.cuda.test_collectives import Gpus
from tests.support.cuda import DEVICE
from tests.unit.optim.parameters import gradients, parameters

SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (FusedAdam, {"weight_decay": 0.1}),
    "Adam with decay in the gradient": (FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}),
    "LAMB": (FusedLAMB, {"weight_decay": 0.1}),
    "LAMB as NVIDIA's": (FusedLAMB, {"use_nvlamb": True, "weight_decay": 0.0, "adam_w_mode": False}),
    "NovoGrad": (FusedNovoGrad, {"weight_decay": 0.1}),
    "NovoGrad of the maximum": (FusedNovoGrad, {"norm_type": 0, "reg_inside_moment": True}),
}


def stepped(kind: Any, settings: dict[str, Any], device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameters after steps, of which the last are those of an optimizer that has loaded a state."""
    params = [nn.Parameter(one.detach().to(device, dtype)) for one in parameters()]
    optimizer = kind(params, lr=0.02, **settings)
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = kind(params, lr=0.02, **settings)
            optimizer.load_state_dict(saved)
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad.to(device, dtype)
        optimizer.step()
    for param in params:
        assert param.device.type == device
        for name, value in optimizer.state[param].items():
            assert not isinstance(value, torch.Tensor) or value.device.type == device, name
    return [param.detach().cpu() for param in params]


def as_on_the_cpu(name: str) -> None:
    kind, settings = SETTINGS[name]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        expected = stepped(kind, settings, "cpu", dtype)
        loose = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(stepped(kind, settings, DEVICE, dtype), expected, **loose)


@pytest.mark.parametrize("name", SETTINGS)
def test_fused_optimizers_step_as_on_the_cpu(gpus: Gpus, name: str) -> None:
    gpus(2).run(as_on_the_cpu, name)


def parameters_of_both_devices() -> None:
    """One group may have parameters on the CPU beside those on CUDA."""
    found = []
    for devices in (("cpu", "cpu"), ("cpu", "cuda")):
        params = [nn.Parameter(torch.arange(4.0).to(device)) for device in devices]
        for optimizer in (FusedAdam(params, lr=0.1), FusedLAMB(params), FusedNovoGrad(params)):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        found.append([param.detach().cpu() for param in params])
    torch.testing.assert_close(found[1], found[0])


def test_fused_optimizers_take_parameters_of_both_devices(gpus: Gpus) -> None:
    gpus(2).run(parameters_of_both_devices)


def norms_over_groups(backend: str) -> None:
    """Also where a rank has no gradients, or has them on another device than the others."""
    rank = dist.get_rank()
    group = dist.new_group(backend=backend)
    everywhere = torch.full((3,), 2.0)
    for here, total in (
        ([everywhere.cuda()], 24),
        ([everywhere.cuda()] if rank == 0 else [], 12),
        ([everywhere.cuda() if rank == 0 else everywhere], 24),
        ([], 0),
    ):
        norm = global_norm(here, group=group)
        assert norm.item() ** 2 == pytest.approx(total)
        assert norm.dtype == torch.float64
        assert not here or norm.device == here[0].device
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["smddp", "nccl"])
def test_the_norm_of_all_gradients_is_that_of_all_ranks(gpus: Gpus, backend: str) -> None:
    gpus(2).run(norms_over_groups, backend)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), FusedLayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 2))


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator).cuda(), torch.randn(8, 2, generator=generator).cuda()


def trained_in_one_process(kind: Any) -> dict[str, torch.Tensor]:
    model = network().cuda()
    optimizer = kind(model.parameters(), lr=0.05)
    for step in range(3):
        inputs, targets = rows(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def split_and_stepped(name: str) -> None:
    """A model in two parts is updated as the whole one, by norms that go over both."""
    kind = {"FusedAdam": FusedAdam, "FusedLAMB": FusedLAMB, "FusedNovoGrad": FusedNovoGrad}[name]
    expected = trained_in_one_process(kind)
    smp.init({"partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(network())
    optimizer = smp.DistributedOptimizer(kind(model.parameters(), lr=0.05))

    @smp.step
    def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(inputs), targets)
        model.backward(loss)
        return loss

    for step in range(3):
        optimizer.zero_grad()
        train(*rows(step))
        optimizer.step()
    for local, parameter in model.local_named_parameters():
        assert parameter.device.type == DEVICE
        torch.testing.assert_close(parameter.cpu(), expected[local], rtol=1e-4, atol=1e-5, msg=local)
    smp.shutdown()


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad"])
def test_split_models_are_stepped_as_whole_ones(gpus: Gpus, name: str) -> None:
    gpus(2).run(split_and_stepped, name, backend=None, timeout=60, group_timeout=30)


def layer_norms() -> None:
    for dtype, form in ((torch.float32, 16), (torch.float16, (4, 16)), (torch.bfloat16, 16)):
        ours = FusedLayerNorm(form, eps=1e-3).to("cuda", dtype)
        theirs = nn.LayerNorm(form, eps=1e-3).to("cuda", dtype)
        inputs = torch.randn(2, 4, 16).to("cuda", dtype)
        one, other = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
        ours(one).square().sum().backward()
        theirs(other).square().sum().backward()
        torch.testing.assert_close(one.grad, other.grad)
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_the_fused_layer_norm_is_torchs_on_cuda(gpus: Gpus) -> None:
    gpus(2).run(layer_norms)

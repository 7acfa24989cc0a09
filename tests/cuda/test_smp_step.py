"""Steps of ``smp`` on CUDA: where models and results are, streams, tensors of two devices, random numbers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from tests.ranks.models.case import CLASSES, WIDTH, classify
from tests.ranks.pipeline.test_random import Noisy, checkpointed_masks, twice_noisy
from tests.support.cuda import DEVICE, MAPPED, CudaRanks
from tests.support.made_on_gpu import on_device
from tests.support.partitioned import restart

Gpus = Callable[[int], CudaRanks]
RATE = 0.05


class Net(nn.Module):
    """Two layers, and one more of each stage's own device beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 256)
        self.norm = nn.BatchNorm1d(256)
        self.second = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return logits


class OnTwoDevices(nn.Module):
    """Its first stage gives the second a tensor of the GPU and one of the CPU, both with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Both()
        self.second = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(*self.first(x))
        return logits


class Both(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = super().forward(x)
        return hidden, hidden.square().mean(1).cpu()


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)

    def forward(self, hidden: Tensor, sizes: Tensor) -> Tensor:  # type: ignore[override]
        assert sizes.device.type == "cpu" and hidden.device.type == DEVICE
        return super().forward(hidden) * sizes.to(hidden.device)[:, None]


def split(module: nn.Module, **settings: Any) -> None:
    """``smp.init`` for two partitions, of which the second has ``second``."""
    by_hand = {"auto_partition": False, "default_partition": 0}
    restart(partitions=2, microbatches=4, **by_hand, **settings)
    smp.set_partition(module.get_submodule("second"), 1)


MOMENTUM: dict[str, Any] = {"kind": torch.optim.SGD, "lr": RATE, "momentum": 0.9}


def trained_beside(
    module: nn.Module,
    model: Any,
    plain: nn.Module,
    *,
    steps: int = 3,
    optimizers: Mapping[str, Any] = MOMENTUM,
) -> None:
    """Both train on the same batches, the plain one microbatch by microbatch, and stay equal."""
    options = dict(optimizers)
    kind = options.pop("kind")
    optimizer = smp.DistributedOptimizer(kind(module.parameters(), **options))
    plains = kind(plain.parameters(), **options)

    @smp.step
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        model.backward(loss)
        return loss, loss.detach().cpu(), logits

    for number in range(steps):
        x, y = (each.to(DEVICE) for each in classify(number, 8))
        optimizer.zero_grad(), plains.zero_grad()
        losses, on_cpu, logits = step(x, y)
        wanted = [F.cross_entropy(plain(piece), of) for piece, of in zip(x.chunk(4), y.chunk(4), strict=True)]
        for loss in wanted:
            torch.autograd.backward(loss / 4)
        mean = losses.reduce_mean()
        assert mean.device.type == logits.concat().device.type == DEVICE and not mean.requires_grad
        assert on_cpu.reduce_mean().device.type == "cpu"
        torch.testing.assert_close(losses.stack(), torch.stack(wanted).detach())
        torch.testing.assert_close(on_cpu.stack(), torch.stack(wanted).detach().cpu())
        assert logits.concat().shape == (8, CLASSES)
        for (name, mine), other in zip(module.named_parameters(), plain.parameters(), strict=True):
            if model.is_local(name):
                assert mine.device.type == DEVICE
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
        optimizer.step(), plains.step()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name].to(DEVICE), value, rtol=1e-4, atol=1e-5, msg=name)


HOWS = ("before", "after", "by cuda()", "by its inputs")


def placed(how: str, delayed: bool) -> None:
    """A model that is moved to the GPU by the script, or by nobody, trains as the plain one there."""
    torch.manual_seed(1)
    plain = Net()
    torch.manual_seed(1)
    restart(partitions=2, microbatches=4, delayed_parameter_initialization=delayed)
    with smp.model_creation():
        net = Net()
    if how == "before":
        net.to(DEVICE)
    model = smp.DistributedModel(net)
    if how == "after":
        model.to(DEVICE)
    elif how == "by cuda()" and not MAPPED:
        model.cuda()
    trained_beside(net, model, plain.to(DEVICE))
    with torch.no_grad():
        model.eval(), plain.eval()
        x = classify(9, 8)[0].to(DEVICE)
        found = smp.step(lambda x: model(x))(x).concat()
        torch.testing.assert_close(found, plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", HOWS)
def test_a_model_comes_to_the_gpu_before_or_after_it_is_wrapped(gpus: Gpus, how: str) -> None:
    gpus(2).run(placed, how, False)


def test_parameters_that_are_drawn_in_the_first_step_come_to_the_gpu_of_its_tensors(gpus: Gpus) -> None:
    gpus(2).run(placed, "by its inputs", True)


def with_sums_from_the_beginning() -> None:
    torch.manual_seed(3)
    plain = Net()
    torch.manual_seed(3)
    restart(partitions=2, microbatches=4)
    net = Net()
    sums = {"kind": torch.optim.Adagrad, "lr": RATE, "initial_accumulator_value": 0.1}
    trained_beside(net, smp.DistributedModel(net), plain.to(DEVICE), optimizers=sums)


def test_what_an_optimizer_has_created_comes_to_the_gpu_with_the_model(gpus: Gpus) -> None:
    gpus(2).run(with_sums_from_the_beginning)


def tensors_of_two_devices() -> None:
    torch.manual_seed(2)
    net = OnTwoDevices().to(DEVICE)
    plain = copy.deepcopy(net)
    split(net)
    trained_beside(net, smp.DistributedModel(net), plain)


def test_what_is_on_the_cpu_comes_to_the_next_stage_on_the_cpu(gpus: Gpus) -> None:
    gpus(2).run(tensors_of_two_devices)


class ThroughCpu(nn.Linear):
    """Computes on both devices with weights of the GPU; autograd has a thread for each."""

    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)
        self.gains = nn.ParameterList(torch.linspace(0.5, 1.5, WIDTH).roll(turn) for turn in range(4))
        self.scales = nn.ParameterList(torch.linspace(-1, 1, WIDTH).roll(turn) for turn in range(4))

    def forward(self, x: Tensor) -> Tensor:
        there, here = x.cpu(), x
        for gain, scale in zip(self.gains, self.scales, strict=True):
            there, here = torch.tanh(there * scale.cpu()), torch.tanh(here * gain)
            here = here + there.to(x.device)
        return super().forward(here)


class HalfOnCpu(nn.Module):
    """Its second stage computes partly on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = ThroughCpu()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(torch.relu(self.first(x)))
        return logits


def half_on_the_cpu(schedule: str) -> None:
    torch.manual_seed(6)
    net = HalfOnCpu().to(DEVICE)
    plain = copy.deepcopy(net)
    split(net, pipeline=schedule)
    trained_beside(net, smp.DistributedModel(net), plain, steps=5)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "1f1b"])
def test_a_stage_that_computes_partly_on_the_cpu_trains_as_without_stages(gpus: Gpus, schedule: str) -> None:
    gpus(2).run(half_on_the_cpu, schedule)


def timed() -> None:
    """A plan by times that were measured on the GPU, and a model that the measuring has left as it was."""
    torch.manual_seed(7)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
    net.append(nn.Linear(WIDTH, CLASSES))
    net.to(DEVICE)
    plain = copy.deepcopy(net)
    restart(partitions=2, microbatches=4, memory_weight=0.0, optimize="speed")
    model = smp.DistributedModel(net, trace_execution_times=True)
    trained_beside(net, model, plain)
    assert 0 < sum(map(model.is_local, dict(net.named_parameters()))) < len(list(net.parameters()))


def test_a_plan_by_measured_times_is_made_on_cuda(gpus: Gpus) -> None:
    gpus(2).run(timed)


def on_a_stream() -> None:
    """Every microbatch computes on the stream on which its step was called, whatever its thread."""
    torch.manual_seed(3)
    net = Net().to(DEVICE)
    plain = copy.deepcopy(net)
    split(net)
    model = smp.DistributedModel(net)
    seen: list[Any] = []
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())

    @smp.step
    def step(x: Tensor) -> Tensor:
        seen.append(torch.cuda.current_stream())
        loss: Tensor = model(x).square().mean()
        model.backward(loss)
        return loss

    x = classify(0, 8)[0].to(DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            found = step(x).stack()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(2):
        wanted = [plain(piece).square().mean() for piece in x.chunk(4)]
        torch.autograd.backward(torch.stack(wanted).mean())
    torch.testing.assert_close(found, torch.stack(wanted).detach())
    for (name, mine), other in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        if model.is_local(name):
            torch.testing.assert_close(mine.grad, other[1].grad, rtol=1e-4, atol=1e-6, msg=name)
    assert len(seen) >= 8
    assert MAPPED or set(seen) == {stream}, seen


def test_microbatches_compute_on_the_stream_of_their_step(gpus: Gpus) -> None:
    gpus(2).run(on_a_stream)


def test_the_same_seed_gives_the_same_training(gpus: Gpus) -> None:
    for first, second in itertools.pairwise(gpus(2).run(on_device, twice_noisy, Noisy)):
        for mine, others in zip(first, second, strict=True):
            assert mine[0] == mine[1] == others[0]


def test_checkpointing_recomputes_with_the_same_masks(gpus: Gpus) -> None:
    gpus(2).run(on_device, checkpointed_masks)


def steady() -> list[int]:
    """Bytes on the device after each of several equal steps."""
    torch.manual_seed(5)
    net = Net().to(DEVICE)
    split(net)
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        model.backward(loss)
        return loss

    held = []
    x = torch.ones(4096, WIDTH, device=DEVICE)
    for _ in range(7):
        model.zero_grad()
        step(x).reduce_mean().item()
        torch.cuda.synchronize()
        held.append(0 if MAPPED else torch.cuda.memory_allocated())
    return held


def test_equal_steps_keep_no_more_and_more_of_what_they_have_sent(gpus: Gpus) -> None:
    for held in gpus(2).run(steady):
        assert max(held[2:]) - min(held[2:]) < 8 << 20, held  # each step sends 4 MiB, and gets as much back


def in_half_with_a_scaler() -> None:
    """Autocast and a GradScaler as torch's own recipe has them, one gradient clipped after unscaling."""
    torch.manual_seed(4)
    net = Net().to(DEVICE)
    plain = copy.deepcopy(net)
    split(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-3))
    plains = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    scaler = smp.amp.GradScaler(device=DEVICE, init_scale=64.0)
    reference = torch.amp.GradScaler(DEVICE, init_scale=64.0)

    @smp.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.float16):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        assert logits.dtype is torch.float16
        model.backward(scaler.scale(loss))
        return loss

    for number in range(3):
        x, y = (each.to(DEVICE) for each in classify(number, 8))
        optimizer.zero_grad(), plains.zero_grad()
        found = step(x, y).stack()
        wanted = []
        for piece, of in zip(x.chunk(4), y.chunk(4), strict=True):
            with torch.autocast(DEVICE, dtype=torch.float16):
                wanted.append(F.cross_entropy(plain(piece), of))
            torch.autograd.backward(reference.scale(wanted[-1] / 4))
        scaler.unscale_(optimizer)
        reference.unscale_(plains)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
        assert optimizer.clip_master_grads(0.5) == pytest.approx(norm, rel=5e-3)
        scaler.step(optimizer), reference.step(plains)
        scaler.update()
        reference.update()
        torch.testing.assert_close(found, torch.stack(wanted).detach(), rtol=5e-3, atol=1e-3)
    assert scaler.get_scale() == reference.get_scale() == 64.0


def test_autocast_and_a_scaler_train_like_torchs_own(gpus: Gpus) -> None:
    gpus(2).run(in_half_with_a_scaler)


def objects_and_barriers() -> None:
    """Objects with tensors of the GPU between ranks, and barriers."""
    restart(partitions=2, ddp=True)
    mine = {"rank": smp.rank(), "tensor": torch.arange(3, device=DEVICE) + smp.rank()}
    if smp.rank() == 0:
        smp.send(mine, 1, smp.WORLD_RANK)
        smp.broadcast(mine, smp.WORLD)
    else:
        for _ in range(2):
            got = smp.recv_from(0, smp.WORLD_RANK)
            assert got["rank"] == 0 and got["tensor"].device.type == DEVICE
            assert got["tensor"].tolist() == [0, 1, 2]
    everyones = smp.allgather(mine, smp.WORLD)
    assert [each["tensor"].tolist() for each in everyones] == [[0, 1, 2], [1, 2, 3]]
    smp.barrier()
    smp.mp_barrier()
    smp.dp_barrier()


def test_objects_with_tensors_of_a_gpu_go_between_ranks(gpus: Gpus) -> None:
    gpus(2).run(objects_and_barriers)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_other_groups_than_those_of_smddp_carry_a_pipeline(gpus: Gpus, backend: str) -> None:
    if MAPPED:
        pytest.skip("mapped groups are those of smddp")
    gpus(2).run(placed, "before", False, backend=backend)

"""fp16 and bf16 on whole and split models and their replicas, against torch's own recipe in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.init import shutdown
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
ROWS, WIDTH, STEPS, CLIP = 8, 16, 3, 0.5
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Net(nn.Module):
    """Layers to cut, and a buffer; gives a dict, as Hugging Face's models do."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        assert x.dtype == self.head.weight.dtype, "the model is given what it computes in"
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"logits": self.head(x + self.shift)}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def early_state(parameters: Any) -> torch.optim.Optimizer:
    """One that has state before there are masters."""
    return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.125)


@dataclass(frozen=True)
class Case:
    """A precision, and how it is trained."""

    key: str
    scale: float = 1.0
    microbatches: int = 1
    optimizer: Callable[[Any], torch.optim.Optimizer] = optimizer_of


CASES = (
    Case("fp16", scale=1024.0),
    Case("fp16", scale=64.0, microbatches=4),
    Case("bf16"),
    Case("bf16", microbatches=4),
    Case("bf16", optimizer=early_state),
)


def data(step: int, replicas: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(replicas * ROWS, WIDTH, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def recipe(case: Case, replicas: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms before clipping, and masters of plain PyTorch with FP32 copies of half a model."""
    torch.manual_seed(0)
    model = Net().to(DTYPES[case.key])
    masters = {name: weight.detach().float().requires_grad_() for name, weight in model.named_parameters()}
    optimizer = case.optimizer(masters.values())
    losses, norms = [], []
    for step in range(STEPS):
        pieces = list(zip(*(one.chunk(case.microbatches) for one in data(step, replicas)), strict=True))
        total = 0.0
        for x, y in pieces:
            loss = F.mse_loss(model(x.to(DTYPES[case.key]))["logits"].float(), y)
            (loss * (case.scale / case.microbatches)).backward()
            total += loss.item() / case.microbatches
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad.float() / case.scale
            parameter.grad = None
        norms.append(nn.utils.clip_grad_norm_(masters.values(), CLIP).item())
        optimizer.step()
        losses.append(total)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return losses, norms, masters


class Training:
    """A script's model, optimizer and step function under a precision."""

    def __init__(self, case: Case, partitions: int, **settings: Any) -> None:
        shutdown()
        smp.init({case.key: True, "partitions": partitions, "microbatches": case.microbatches, "ddp": True})
        torch.manual_seed(smp.dp_rank())  # the first replica's values must win, in the masters, too
        self.model = smp.DistributedModel(Net())
        plain = case.optimizer(self.model.parameters())
        self.optimizer = smp.DistributedOptimizer(plain, **({"static_loss_scale": case.scale} | settings))

        @smp.step
        def step_function(x: Tensor, y: Tensor) -> Tensor:
            logits = self.model(x)["logits"]
            assert logits.dtype == torch.float32, "the loss is computed in FP32"
            loss = F.mse_loss(logits, y)
            self.optimizer.backward(loss) if case.microbatches == 1 else self.model.backward(loss)
            return loss

        self.step_function = step_function

    def forward_backward(self, step: int) -> float:
        """The loss, averaged over replicas."""
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        x, y = data(step, smp.dp_size())
        mine = slice(smp.dp_rank() * ROWS, (smp.dp_rank() + 1) * ROWS)
        loss = self.step_function(x[mine], y[mine]).reduce_mean()
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        return float(loss) / smp.dp_size()

    def train(self, step: int) -> float:
        loss = self.forward_backward(step)
        self.optimizer.clip_master_grads(CLIP)
        self.optimizer.step()
        return loss

    def masters(self) -> dict[str, Tensor]:
        """This rank's, by name."""
        names = {id(parameter): name for name, parameter in self.model.local_named_parameters()}
        groups = zip(self.optimizer.fp16_groups, self.optimizer.fp32_from_fp16_groups, strict=True)
        return {
            names[id(parameter)]: master
            for parameters, masters in groups
            for parameter, master in zip(parameters, masters, strict=True)
        }


def every_case(partitions: int) -> None:
    for case in CASES:
        training = Training(case, partitions)
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(training.forward_backward(step))
            norms.append(training.optimizer.clip_master_grads(CLIP))
            training.optimizer.step()
            assert not training.optimizer.overflow
        wanted_losses, wanted_norms, wanted = recipe(case, smp.dp_size())
        exact = case.microbatches == smp.dp_size() == 1  # else halves are added in another order
        close = {"rtol": 1e-6, "atol": 1e-7} if exact else {"rtol": 0.02, "atol": 2e-3}
        label = f"{case}, {partitions} partitions, {smp.dp_size()} replicas"
        torch.testing.assert_close(losses, wanted_losses, msg=label, **close)
        torch.testing.assert_close(norms, wanted_norms, msg=label, **close)
        masters = training.masters()
        assert masters and len(masters) == len(training.optimizer.master_params)
        for name, master in masters.items():
            assert master.dtype == torch.float32
            torch.testing.assert_close(master, wanted[name], msg=label, **close)
            reached = training.model.module.module.module  # as deep as in scripts for 16 bits
            assert reached is training.model.get_module() and not hasattr(reached, "module")
            assert torch.equal(reached.get_parameter(name), master.to(DTYPES[case.key]))
        assert training.optimizer.loss_scale == training.optimizer.loss_scaler.cur_scale == case.scale


def check_overflow(partitions: int) -> None:
    """An infinity on any rank makes all skip the step and lower the scale."""
    case = Case("fp16")
    settings = {"init_scale": 256.0, "scale_window": 2}
    training = Training(case, partitions, dynamic_loss_scale=True, dynamic_loss_args=settings)
    seen = []
    for step, bad in enumerate([None, 0, dist.get_world_size() - 1, None, None]):
        training.forward_backward(step)
        if dist.get_rank() == bad:
            next(training.model.local_parameters()).grad[0] = float("nan")
        before = copy.deepcopy(training.masters())
        norm = training.optimizer.clip_master_grads(CLIP) if step != 2 else None
        training.optimizer.step()
        unchanged = all(torch.equal(before[name], master) for name, master in training.masters().items())
        assert unchanged == training.optimizer.overflow == (bad is not None)
        assert norm is None or (norm == -1.0) == training.optimizer.overflow
        seen.append(training.optimizer.loss_scale)
    assert seen == [256.0, 128.0, 64.0, 64.0, 128.0]

    training.optimizer.zero_grad()
    x, y = data(0, 1)

    @smp.step
    def unscaled(x: Tensor, y: Tensor) -> None:
        F.mse_loss(training.model(x)["logits"], y).backward()

    unscaled(x, y)
    with pytest.raises(SMPError, match=r"call\s+model\.backward\(loss\) in the step function instead"):
        training.optimizer.step()

    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for scaled_twice in (lambda: scaler.step(training.optimizer), lambda: smp.amp.GradScaler("cpu")):
        with pytest.raises(
            SMPError, match=r"a GradScaler .* does not find the gradients of the FP32 masters"
        ):
            scaled_twice()
    smp.amp.GradScaler("cpu", enabled=False)


def check_resume(folder: Path) -> None:
    """State dicts and checkpoints have masters and scale: training goes on as if undisturbed."""
    case, dynamic = Case("fp16"), {"dynamic_loss_scale": True, "init_scale": 2.0**10, "scale_window": 2}
    world = dist.get_world_size()
    training = Training(case, world, **dynamic)
    with pytest.raises(SMPError, match=r"optimizer\.step was called before the first smp\.step"):
        training.optimizer.step()
    training.train(0), training.train(1)
    smp.save_checkpoint(str(folder), "one", model=training.model, optimizer=training.optimizer)
    full = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    partial = copy.deepcopy(training.optimizer.local_state_dict())
    wanted = [training.train(step) for step in (2, 3)], training.optimizer.state_dict()
    plain = optimizer_of(Net().parameters())
    plain.load_state_dict(full[1])
    assert full[1]["loss_scale"]["loss_scale"] == 2.0**11 and full[0]["head.weight"].dtype == torch.float16

    def resume(load: Callable[[Training], Any], partitions: int = world, *, first: bool = True) -> None:
        again = Training(case, partitions, **dynamic)
        if not first:
            again.train(5)
        load(again)
        assert [again.train(step) for step in (2, 3)] == wanted[0]
        for number, entries in wanted[1]["state"].items():
            for key, value in entries.items():
                assert torch.equal(again.optimizer.state_dict()["state"][number][key], value), key
        assert again.optimizer.state_dict()["loss_scale"] == wanted[1]["loss_scale"]

    def by_hand(again: Training, optimizer: Any = full[1], *, model_last: bool = False) -> None:
        if not model_last:
            again.model.load_state_dict(full[0])
        again.optimizer.load_state_dict(copy.deepcopy(optimizer))
        if model_last:
            again.model.load_state_dict(full[0])

    resume(lambda again: smp.resume_from_checkpoint(str(folder)))
    resume(lambda again: smp.resume_from_checkpoint(str(folder)), first=False)
    resume(by_hand)
    resume(lambda again: by_hand(again, model_last=True), first=False)
    resume(lambda again: by_hand(again, partial), first=False)

    again = Training(case, world, **dynamic)
    again.train(0)
    wrong = copy.deepcopy(full[1])
    wrong["state"][0]["master_weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match="does not fit the parameters"):
        again.optimizer.load_state_dict(wrong)
    with torch.no_grad():
        for parameter in again.model.local_parameters():
            parameter.fill_(0.5)
    again.optimizer.reload_model_params()
    assert all(bool((weight == 0.5).all()) for weight in again.optimizer.master_params)


def check_without(partitions: int) -> None:
    """Scripts read the same names with FP32, and a state dict with masters loads there."""
    half = Training(Case("fp16"), partitions)
    half.train(0)
    saved = half.model.state_dict(), half.optimizer.state_dict()
    shutdown()
    smp.init({"partitions": partitions, "ddp": True})
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()), dynamic_loss_scale=True)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert "master_weight" not in str(optimizer.state_dict())
    assert (optimizer.overflow, optimizer.loss_scale) == (False, 1.0)
    optimizer.update_master_grads()
    assert [id(parameter) for parameter in optimizer.master_params] == [
        id(parameter) for parameter in model.parameters()
    ]


def scheduled_losses(settings: dict[str, Any], *, early: bool) -> list[float]:
    """With a scheduler that was made before smp.DistributedOptimizer, or after it."""
    shutdown()
    smp.init({"partitions": 2, "microbatches": 2, "ddp": True, **settings})
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if early else None
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    @smp.step
    def step_function(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x)["logits"].float(), y)
        model.backward(loss)
        return loss

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(step_function(*data(step, 1)).reduce_mean().item())
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the scheduler's own, that it has seen no step
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05 * 0.5**STEPS
    shutdown()
    return losses


def check_early_scheduler(settings: dict[str, Any]) -> None:
    late = scheduled_losses(settings, early=False)
    assert scheduled_losses(settings, early=True) == late and len(set(late)) == STEPS


def check_replaced_step() -> None:
    smp.init({"partitions": 2})
    replaced = torch.optim.SGD(Net().parameters(), lr=0.1)
    replaced.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"step of this SGD was replaced by .* then replace its step"):
        smp.DistributedOptimizer(replaced)
    shutdown()


def test_half_precision_trains_like_torchs_own_recipe(pool: Pools) -> None:
    for world, partitions in ((2, 1), (2, 2), (4, 2)):
        pool(world).run(every_case, partitions)


def test_an_infinity_on_any_rank_makes_all_skip_the_step(pool: Pools) -> None:
    for world, partitions in ((2, 1), (2, 2), (4, 2)):
        pool(world).run(check_overflow, partitions)


def changed_before_the_first_step(partitions: int) -> None:
    """A rate that is set, and a group that is added, between loading and the first step count."""
    losses = []
    for early in (False, True):
        training = Training(Case("bf16", optimizer=first_layers), partitions)
        training.train(0)
        saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
        if early:
            training = Training(Case("bf16", optimizer=first_layers), partitions)
            training.model.load_state_dict(saved[0])
            training.optimizer.load_state_dict(saved[1])
        assert training.optimizer.param_groups[0]["lr"] == 0.1
        training.optimizer.param_groups[0]["lr"] = 0.02
        head = [each for name, each in training.model.named_parameters() if "head" in name]
        training.optimizer.add_param_group({"params": head, "lr": 0.03})
        groups = training.optimizer.state_dict()["param_groups"]
        assert [group["lr"] for group in groups] == [0.02, 0.03]
        losses.append([training.train(step) for step in (1, 2, 3)])
    assert losses[0] == losses[1]


def first_layers(parameters: Any) -> torch.optim.Optimizer:
    """Without the head's weight and bias."""
    return optimizer_of(list(parameters)[:-2])


def test_groups_may_be_changed_between_loading_and_the_first_step(pool: Pools) -> None:
    for partitions in (1, 2):
        pool(2).run(changed_before_the_first_step, partitions)


def test_half_precision_goes_on_from_state_dicts_and_checkpoints(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(check_resume, tmp_path)


def test_without_half_precision_the_parameters_are_their_own_masters(pool: Pools) -> None:
    pool(2).run(check_without, 2)


@pytest.mark.parametrize(
    "settings",
    [{"fp16": True}, {"bf16": True}, {"shard_optimizer_state": True}, {"sharded_data_parallel_degree": 2}],
    ids=str,
)
def test_a_scheduler_may_be_made_before_the_distributed_optimizer(
    pool: Pools, settings: dict[str, Any]
) -> None:
    pool(4).run(check_early_scheduler, settings)


def test_a_step_that_the_script_has_replaced_is_refused(pool: Pools) -> None:
    pool(2).run(check_replaced_step)

"""DistributedOptimizer and GradScaler on a model in parts, against the whole model in one process."""

from __future__ import annotations

import copy
import itertools
import warnings
from abc import ABC
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel import communicate
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.optimizer import DistributedOptimizer
from opensmd.modelparallel.precision.grad_scaler import GradScaler
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState
from opensmd.optim import FusedAdam, FusedLAMB, FusedNovoGrad
from tests.support.partitioned import restart, split
from tests.support.ranks import RankPool


def module() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [one for name, one in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [one for name, one in named if name.endswith("bias")], "lr": 0.05},
    ]


def set_grads(model: nn.Module, step: int, is_local: Callable[[str], bool] = lambda name: True) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        grad = torch.randn(parameter.shape, generator=generator)
        parameter.grad = grad if is_local(name) else None


class ClippingSGD(torch.optim.SGD):
    """Has a limit for the norm of all gradients among its settings, as LAMB has."""

    def __init__(self, params: Any, lr: float, max_grad_norm: float | None) -> None:
        super().__init__(params, lr)
        self.defaults["max_grad_norm"] = max_grad_norm


class AbstractSGD(ABC, torch.optim.SGD):
    """Begins with a class that has no fields, as the optimizers of pytorch-optimizer do."""


class Wrapper(torch.optim.Optimizer):
    """Lets another optimizer step, as Lookahead does; both have the same groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Lookahead(Wrapper):
    """Has state dicts of another form than torch's."""

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.state, "fast": self.optimizer.state_dict()}


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    lambda groups: torch.optim.AdamW(groups, lr=0.1),
    lambda groups: AbstractSGD(groups, lr=0.1, momentum=0.9),
    lambda groups: Wrapper(torch.optim.SGD(groups, lr=0.1)),
    lambda groups: FusedAdam(groups, lr=0.1),
    lambda groups: FusedLAMB(groups, lr=0.1),
    lambda groups: FusedNovoGrad(groups, lr=0.1),
]


def same(one: Any, other: Any) -> bool:
    """Deep equality; tensors to rounding, because norms over parts are added in another order."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.allclose(one, other, rtol=1e-5, atol=1e-7)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_training(make: Callable[[Any], torch.optim.Optimizer], when: str) -> None:
    whole = module()
    plain = make(groups_of(whole))
    inner = module()
    model: ModelState | None = None
    if when == "after":
        model = ModelState(inner)
    given = make(groups_of(inner))
    optimizer = DistributedOptimizer(
        given, static_loss_scale=None, dynamic_loss_scale=True, dynamic_loss_args={}
    )
    assert optimizer is given and isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, Wrapper) or optimizer.optimizer is optimizer
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.7) for one in (plain, optimizer)]
    with pytest.raises(SMPError, match="once the model is partitioned"):
        optimizer.local_state_dict()
    model = model or ModelState(inner)
    set_grads(whole, 0)
    set_grads(inner, 0)
    plain.step()
    optimizer.step()
    assert same(optimizer.state_dict(), plain.state_dict())
    optimizer.zero_grad(set_to_none=True)
    for parameter in model.parameters():
        parameter.grad = None
    split(model)
    local = {id(weight) for weight in model.local_parameters()}
    assert {id(weight) for group in optimizer.param_groups for weight in group["params"]} == local
    assert {id(one) for one in optimizer.state} <= local, "state of other ranks is gone"
    for step in (1, 2):
        set_grads(whole, step)
        set_grads(inner, step, model.is_local)
        plain.step()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert same(dict(model.state_dict()), dict(whole.state_dict()))
    full = optimizer.state_dict()
    assert same(full, plain.state_dict()), "a full state dict is plain PyTorch's"

    fresh = make(groups_of(module()))
    fresh.load_state_dict(full)
    partial = copy.deepcopy(optimizer.local_state_dict())
    assert partial["_smp_is_partial"] is True
    for source in (copy.deepcopy(plain.state_dict()), partial):
        set_grads(inner, 9, model.is_local)
        optimizer.step()
        optimizer.load_state_dict(source)
        assert same(optimizer.state_dict(), plain.state_dict()), "plain PyTorch's and partial ones load"
    with pytest.raises(ValueError, match=r"groups of sizes \[1\], this optimizer of \[4, 4\]"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    with pytest.raises(ValueError, match="not an optimizer state dict"):
        optimizer.load_state_dict({"weight": 1})


def check_all() -> None:
    for when in ("before", "after"):
        for make in OPTIMIZERS:
            restart(partitions=dist.get_world_size())
            check_training(make, when)


def check_two_optimizers() -> None:
    """Both know of the partition, and both give whole state dicts."""
    restart(partitions=dist.get_world_size())
    whole, inner = module(), module()
    model = ModelState(inner)
    plain = [torch.optim.Adam(group["params"], lr=0.1) for group in groups_of(whole)]
    parts = [DistributedOptimizer(torch.optim.Adam(group["params"], lr=0.1)) for group in groups_of(inner)]
    split(model)
    set_grads(whole, 1)
    set_grads(inner, 1, model.is_local)
    for optimizer in (*plain, *parts):
        optimizer.step()
    local = {id(parameter) for parameter in model.local_parameters()}
    held = {id(parameter) for part in parts for group in part.param_groups for parameter in group["params"]}
    assert held == local
    for expected, optimizer in zip(plain, parts, strict=True):
        assert optimizer.local_state_dict()["_smp_is_partial"] is True
        assert same(optimizer.state_dict(), expected.state_dict())
    ran: list[int] = []
    optimizer.register_step_post_hook(lambda *_: ran.append(1))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert len(ran) == 1, "hooks run once in a step, also after loading"
    lookahead = DistributedOptimizer(Lookahead(torch.optim.SGD(groups_of(inner), lr=0.1)))
    lookahead.step()
    with pytest.raises(SMPError, match=r"Lookahead have a form of their own \(slow, fast\).* wrap what"):
        lookahead.state_dict()


class CountingSGD(torch.optim.SGD):
    """Keeps something under a key of its own beside the state of parameters."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def check_own_keys() -> None:
    restart(partitions=2)
    inner = module()
    optimizer = DistributedOptimizer(CountingSGD(inner.parameters(), lr=0.1, momentum=0.9))
    model = ModelState(inner)
    split(model)
    set_grads(inner, 1, model.is_local)
    optimizer.step()
    whole, part = optimizer.state_dict(), optimizer.local_state_dict()
    assert list(whole["state"]) == [*range(8), "steps"]
    for given in (whole, part):
        optimizer.step()
        optimizer.load_state_dict(given)
        assert optimizer.state["steps"] == 1
    optimizer._smp_follow_plan()
    assert optimizer.state["steps"] == 1


def check_rest() -> None:
    restart(partitions=2)
    for wrong, error in [
        (torch.optim.LBFGS(module().parameters()), ValueError),
        (module(), TypeError),
    ]:
        with pytest.raises(error, match=r"smp\.DistributedOptimizer"):
            DistributedOptimizer(wrong)  # type: ignore[arg-type]
    inner = module()
    named = torch.optim.SGD(inner.named_parameters(), lr=0.1)
    names = list(named.param_groups[0]["param_names"])
    optimizer = DistributedOptimizer(named)
    model = ModelState(inner)
    split(model)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.local_named_parameters()]
    with pytest.raises(
        ValueError, match=r"parameter \d+ of the optimizer, of shape \(7,\), is not a parameter"
    ):
        optimizer.add_param_group({"params": [("strange", nn.Parameter(torch.zeros(7)))]})
    (group,) = optimizer.state_dict()["param_groups"]
    assert group["param_names"] == names

    assert list(state.param_index_to_name_tp_group[0].values()) == names

    whole = module()
    set_grads(whole, 3)
    set_grads(inner, 3, model.is_local)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    assert optimizer.clip_master_grads(0.5) == pytest.approx(float(expected), rel=1e-5)
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter.grad, whole.get_parameter(name).grad, rtol=1e-5)

    for kind, limit, count in [(ClippingSGD, 0.5, 1), (ClippingSGD, None, 0), (FusedLAMB, 0.5, 0)]:
        restart(partitions=2)
        inner = module()
        clipping = DistributedOptimizer(kind(inner.parameters(), lr=0.1, max_grad_norm=limit))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            split(ModelState(inner))
        told = [str(warning.message) for warning in caught]
        found = sum("clips gradients itself (max_grad_norm=0.5)" in one for one in told)
        assert (clipping, found) == (state.optimizer, count)

    restart(partitions=2)
    strange = DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(7))], lr=0.1))
    with pytest.raises(
        ValueError, match=r"parameter 0 of the optimizer, of shape \(7,\), is not a parameter"
    ):
        split(ModelState(module()))
    assert strange is state.optimizer


def check_made_before() -> None:
    """An optimizer whose parameters a model has replaced trains nothing, and says so."""
    for settings in ({"tensor_parallel_degree": 2}, {"sharded_data_parallel_degree": 2}):
        restart(ddp=True, **settings)
        with smp.tensor_parallelism():
            inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        plain = torch.optim.SGD(inner.parameters(), lr=0.1)
        model = smp.DistributedModel(inner)
        smp.step(lambda x, model=model: model.backward(model(x).sum()))(torch.ones(2, 4))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(SMPError, match=r"2 of the 2 parameters of this SGD get no gradients: .* since"):
            plain.step()
    restart(ddp=True, tensor_parallel_degree=2)
    with smp.tensor_parallelism():
        inner = nn.Linear(4, 4)
    wrapped = DistributedOptimizer(torch.optim.SGD(inner.parameters(), lr=0.1))
    model = smp.DistributedModel(inner)
    with pytest.raises(ValueError, match="has distributed modules now: make the optimizer of model"):
        wrapped.state_dict()
    with pytest.raises(ValueError, match="has distributed modules now: make the optimizer of model"):
        smp.step(lambda x: model(x).sum())(torch.ones(2, 4))


def check_scaler() -> None:
    """One rank's infinity makes all ranks skip; the scale stays the same everywhere."""
    for make in (OPTIMIZERS[0], OPTIMIZERS[1], lambda groups: torch.optim.Adam(groups, lr=0.1, fused=True)):
        restart(partitions=dist.get_world_size())
        inner = module()
        optimizer = DistributedOptimizer(make(groups_of(inner)))
        model = ModelState(inner)
        split(model)
        scaler = GradScaler(init_scale=4.0, growth_interval=1)
        assert scaler.scale(torch.tensor(2.0)).item() == 8.0
        for step, bad in enumerate([None, 0, dist.get_world_size() - 1, None]):
            before = [parameter.clone() for parameter in model.local_parameters()]
            scale = scaler.get_scale()
            set_grads(inner, step, model.is_local)
            if state.rank == bad:
                next(iter(model.local_parameters())).grad[0] = float("inf")
            if step == 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            skipped = all(torch.equal(*pair) for pair in zip(before, model.local_parameters(), strict=True))
            assert skipped == (bad is not None)
            assert scaler.get_scale() == (scale * 0.5 if skipped else scale * 2)
        scales = communicate.allgather(scaler.get_scale(), CommGroup.WORLD)
        assert set(scales) == {4.0}


def check_foreign_scaler() -> None:
    """torch's own GradScaler is told of once by every optimizer, also where it skips the step."""
    for make, partitions in itertools.product(
        (OPTIMIZERS[0], OPTIMIZERS[2], lambda groups: torch.optim.Adam(groups, lr=0.1, fused=True)),
        (1, dist.get_world_size()),
    ):
        restart(partitions=partitions, ddp=partitions == 1)
        inner = module()
        optimizer = DistributedOptimizer(make(groups_of(inner)))
        if partitions > 1:
            model = ModelState(inner)
            split(model)
        for scaler in (
            GradScaler(init_scale=4.0, device="cpu"),
            torch.amp.GradScaler("cpu", init_scale=4.0, enabled=False),
            torch.amp.GradScaler("cpu", init_scale=4.0),
        ):
            scaler.scale(torch.ones(()))
            messages = []
            for step in range(2):
                set_grads(inner, step, model.is_local if partitions > 1 else lambda name: True)
                if step == 0:
                    next(
                        parameter for parameter in inner.parameters() if parameter.grad is not None
                    ).grad.fill_(torch.inf)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    scaler.step(optimizer)
                    scaler.update()
                messages += [(str(warning.message), warning.filename) for warning in caught]
            wanted = type(scaler) is torch.amp.GradScaler and scaler.is_enabled() and partitions > 1
            assert len(messages) == wanted, messages
            assert all("smp.amp.GradScaler" in text and path == __file__ for text, path in messages)


def check_ranks_without_parameters() -> None:
    """They may take part in what an optimizer's step exchanges or skip it, as public scripts do."""
    restart(partitions=dist.get_world_size())
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), *[nn.ReLU() for _ in range(4)])
    model = ModelState(inner)
    optimizer = DistributedOptimizer(FusedLAMB(inner.parameters(), lr=0.1))
    split(model)
    owns = len(list(model.local_parameters())) > 0
    assert communicate.allgather(owns, CommGroup.WORLD) == [True] + [False] * (dist.get_world_size() - 1)
    scaler = GradScaler(init_scale=4.0, growth_interval=1)
    for step, (guarded, bad) in enumerate([(True, False), (False, False), (True, True)]):
        set_grads(inner, step, model.is_local)
        if bad and owns:
            inner[0].bias.grad[0] = float("nan")
        if owns or not guarded:
            scaler.step(optimizer)
            scaler.update()
        scaler.follow_owners()
        assert scaler.get_scale() == [8.0, 16.0, 8.0][step]
    off = GradScaler(enabled=False)
    assert off.scale(torch.tensor(3.0)).item() == 3.0
    off.step(optimizer)
    off.follow_owners()


def check_memory_order() -> None:
    """State of another stage arrives with its strides: fused optimizers take them for the parameter's."""
    restart(partitions=2)
    inner = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 2)).to(memory_format=torch.channels_last)
    optimizer, model = DistributedOptimizer(torch.optim.Adam(inner.parameters())), ModelState(inner)
    split(model)
    for name, parameter in inner.named_parameters():
        parameter.grad = torch.ones_like(parameter) if model.is_local(name) else None
    optimizer.step()
    whole = optimizer.state_dict()["state"]
    for number, parameter in enumerate(inner.parameters()):
        assert whole[number]["exp_avg"].stride() == parameter.stride(), number
        assert whole[number]["exp_avg"].unique().numel() == 1


@pytest.mark.parametrize("size", [2, 3])
def test_optimizers_train_and_exchange_state_like_plain_pytorchs(
    pool: Callable[[int], RankPool], size: int
) -> None:
    pool(size).run(check_all, backend="gloo")


def test_two_optimizers_of_one_model_give_whole_state_dicts(pool: Callable[[int], RankPool]) -> None:
    pool(2).run(check_two_optimizers)
    pool(2).run(check_memory_order)


def test_torchs_own_scaler_is_warned_of(pool: Callable[[int], RankPool]) -> None:
    pool(2).run(check_foreign_scaler)


def test_foreign_parameters_names_and_clipping(pool: Callable[[int], RankPool]) -> None:
    pool(2).run(check_rest, backend="gloo")


def test_optimizers_with_parameters_that_the_model_has_replaced_say_so(
    pool: Callable[[int], RankPool],
) -> None:
    pool(2).run(check_made_before)


def test_what_an_optimizer_keeps_under_keys_of_its_own_is_saved_and_loaded(
    pool: Callable[[int], RankPool],
) -> None:
    pool(2).run(check_own_keys, backend="gloo")


def test_an_infinity_on_one_rank_skips_the_step_on_all(pool: Callable[[int], RankPool]) -> None:
    pool(3).run(check_scaler, backend="gloo")


def test_ranks_without_parameters_may_skip_the_optimizers_step(pool: Callable[[int], RankPool]) -> None:
    pool(3).run(check_ranks_without_parameters, backend="gloo")

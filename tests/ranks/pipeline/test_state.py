"""What users do with a split model between steps: look at it, move it, gather it, hook into it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.init import shutdown
from tests.support.ranks import RankPool


def build() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])


def grad_norm(x: Tensor) -> float:
    """Of plain PyTorch."""
    module = build()
    torch.autograd.backward(module(x).square().mean())
    return float(
        torch.stack(
            [parameter.grad.norm() for parameter in module.parameters() if parameter.grad is not None]
        ).norm()
    )


@smp.step
def step(model: Any, x: Tensor) -> Any:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def start(**settings: Any) -> Any:
    shutdown()
    smp.init({"partitions": dist.get_world_size(), "microbatches": 2, **settings})
    return smp.DistributedModel(build())


def local_parts() -> None:
    model = start()
    for name in ("local_parameters", "local_named_buffers", "local_modules", "local_state_dict"):
        with pytest.raises(SMPError, match="works once the model is partitioned"):
            list(getattr(model, name)())
    assert not model.partitioned
    step(model, torch.ones(4, 6))
    assert model.partitioned
    mine = dict(model.local_named_parameters())
    assert mine and len(list(model.parameters())) == 8
    for name, parameter in model.module.named_parameters():
        assert parameter.shape == build().get_parameter(name).shape
        assert (parameter.grad is not None) == (name in mine)
    assert sum(map(len, smp.allgather(list(mine), smp.MP_GROUP))) == 8
    modules = [name for name, module in model.local_named_modules() if not list(module.children())]
    assert {f"{name}.weight" for name in modules} == {name for name in mine if "weight" in name}
    partial = model.local_state_dict()
    assert set(partial) == {*mine, "_smp_is_partial"} and partial["_smp_is_partial"] is True
    assert set(model.orig_state_dict()) == set(mine)
    whole = model.state_dict()
    assert list(whole) == list(build().state_dict())
    for name, value in build().state_dict().items():
        assert torch.equal(whole[name], value)
    first_only = model.state_dict(gather_to_rank0=True)
    assert len(first_only) == (8 if smp.mp_rank() == 0 else 0)


def norms() -> None:
    """The script's own norm over its group, and the optimizer's, are those of the whole model."""
    model = start()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(4, 6)
    step(model, x)
    square = sum(parameter.grad.square().sum() for parameter in model.local_parameters())
    dist.all_reduce(square, group=smp.get_mp_process_group())
    assert square.sqrt().item() == pytest.approx(grad_norm(x), rel=1e-5)
    assert optimizer.clip_master_grads(1e-3) == pytest.approx(grad_norm(x), rel=1e-5)
    assert optimizer.clip_master_grads(1.0) == pytest.approx(1e-3, rel=1e-2)


def remote_parameters() -> None:
    """Reading what is elsewhere is an error that says what to do instead."""
    model = start()
    step(model, torch.ones(4, 6))
    mine = {name for name, _ in model.local_named_parameters()}
    for name, parameter in model.module.named_parameters():
        if name in mine:
            assert torch.isfinite(parameter.sum())
            continue
        assert parameter.numel() in (6, 36) and repr(parameter).startswith("RemoteParameter")
        state = model.module.state_dict()[name]
        for one in (parameter, parameter.data, parameter.detach(), parameter.data.detach(), state):
            assert one.shape == parameter.shape and one.dtype == torch.float32
            with pytest.raises(SMPError, match=r"model\.local_parameters\(\) for what is here"):
                one.sum()
            with pytest.raises(SMPError, match="on another pipeline rank"):
                one.numpy()
            with pytest.raises(SMPError, match="on another pipeline rank"):
                nn.init.zeros_(one)


def moves() -> None:
    model = start()
    step(model, torch.ones(4, 6))
    before = [parameter.data_ptr() for parameter in model.local_parameters()]
    assert model.to(torch.device("cpu")) is model
    assert model.to(torch.float32) is model
    assert model.float() is model
    for change in (model.double, model.half, model.bfloat16):
        with pytest.raises(SMPError, match=r"cannot go from torch\.float32 on cpu to"):
            change()
    assert [parameter.data_ptr() for parameter in model.local_parameters()] == before
    with pytest.raises(SMPError, match=r"cannot go from torch.float32 on cpu to torch.float64 on cpu any"):
        model.to(torch.float64)
    first = step(model, torch.ones(4, 6)).reduce_mean()
    assert torch.isfinite(first)


def gathering() -> None:
    model = start()
    x = torch.ones(4, 6)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, x)
    optimizer.step()
    plain = build()
    torch.autograd.backward(plain(x).square().mean())
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert model.cpu() is model
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    torch.testing.assert_close(model.get_module()(x), plain(x))
    torch.testing.assert_close(model.cpu().get_module()(x), plain(x))
    with pytest.raises(SMPError, match=r"model\.cpu\(\) has put the whole model on every rank"):
        step(model, x)


def hooks() -> None:
    """Hooks run once, with model and optimizer, when their moment has come; parameters set there count."""
    model = start()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[str] = []

    def zero(given: Any, with_optimizer: Any) -> None:
        assert given is model and with_optimizer is optimizer and given.partitioned
        seen.append("partition")
        for parameter in given.local_parameters():
            nn.init.zeros_(parameter)

    model.register_post_partition_hook(lambda *_: seen.append("never")).remove()
    model.register_post_partition_hook(zero)
    model.register_post_step_hook(lambda *_: seen.append("step"))
    assert step(model, torch.ones(4, 6)).reduce_mean().item() == 0.0
    assert seen == ["partition", "step"]
    step(model, torch.ones(4, 6))
    model.register_post_partition_hook(lambda *_: seen.append("late"))
    assert seen == ["partition", "step", "late"]


def bad_batches() -> None:
    """A batch that microbatches do not divide is refused on every rank, and the next one is fine."""
    model = start(microbatches=4)
    wanted = step(model, torch.ones(8, 6)).reduce_mean().item()
    for rows in (6, 3):
        with pytest.raises(ValueError, match=f"{rows}"):
            step(model, torch.ones(rows, 6))
    assert step(model, torch.ones(8, 6)).reduce_mean().item() == pytest.approx(wanted)
    assert step(model, torch.ones(4, 6)).reduce_mean().item() == pytest.approx(wanted)


def different_batches() -> None:
    """The first rank's data counts; the others may pass nothing at all."""
    model = start()
    wanted = step(model, torch.full((4, 6), 0.5)).reduce_mean().item()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = step(model, torch.full((4, 6), 0.5 if smp.pp_rank() == 0 else 9.0)).reduce_mean().item()
    assert found == pytest.approx(wanted)
    assert any(
        "same shapes; the data of the first rank is used" in str(warning.message) for warning in caught
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        negated = torch._neg_view(torch.full((4, 6), -0.5))  # which is 0.5 to torch and not in memory
        for batch in (torch.full((4, 6), 0.5), negated):
            found = step(model, batch if smp.pp_rank() == 0 else torch.empty(0)).reduce_mean()
            assert found.item() == pytest.approx(wanted)


def frozen_where_they_live() -> None:
    """What a rank freezes and switches of its own part counts on all, in the first step's hooks and later."""
    model = start()
    model.register_post_partition_hook(
        lambda *_: [each.requires_grad_(False) for each in model.local_parameters() if each.dim() == 1]
    )
    step(model, torch.ones(4, 6))
    assert [each.requires_grad for each in model.parameters()] == [True, False] * 4
    for parameter in model.local_parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    for module in model.local_modules():
        if isinstance(module, nn.Linear):
            module.eval()
    model.zero_grad()
    step(model, torch.ones(4, 6))
    assert [each.requires_grad for each in model.parameters()] == [False, True] * 4
    assert not any(layer.training for layer in model.get_module())
    assert all((each.grad is not None) == (each.dim() == 1) for each in model.local_parameters())


def switched_on_one_rank() -> None:
    """A change on one rank alone, of what lives elsewhere or before the first step, is an error on all."""
    for number, change in enumerate((lambda it: it.requires_grad_(False), nn.Module.eval)):
        for trained in (True, False):
            model = start()
            if trained:
                step(model, torch.ones(4, 6))
            if smp.pp_rank() == 0:
                change(model.get_module()[3 if trained else 0])
            shown = ["requires_grad of parameter '%d.weight'", "training of module '%d'"][number]
            place, home = (3, smp.pp_size() - 1) if trained else (0, 0)
            with pytest.raises(
                SMPError, match=f"{shown % place} is {trained} on pipeline rank {home}, where"
            ):
                step(model, torch.ones(4, 6))


FUNCTIONS = [
    local_parts,
    norms,
    remote_parameters,
    moves,
    gathering,
    hooks,
    bad_batches,
    different_batches,
    frozen_where_they_live,
    switched_on_one_rank,
]


def everything() -> None:
    for function in FUNCTIONS:
        function()
    shutdown()


@pytest.mark.parametrize("stages", [2, 4])
def test_a_split_model_is_what_users_expect_between_steps(
    pool: Callable[[int], RankPool], stages: int
) -> None:
    pool(stages).run(everything)

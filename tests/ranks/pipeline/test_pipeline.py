"""Pipelines of two and four stages: every schedule and number of microbatches, steps of many shapes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from tests.ranks.models.case import CLASSES, WIDTH, classify
from tests.support.equality import Pools, Setup, compare, find

MICROBATCHES = (1, 2, 4, 8)
SCHEDULES = ("simple", "interleaved")
ROWS = 8


def check(pool: Pools, name: str, setups: list[Setup], *, family: str = "wiring") -> None:
    for setup in setups:
        wrong = compare(pool, family, find(family, name), setup)
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_number_of_microbatches_trains_like_plain_pytorch(
    pool: Pools, stages: int, schedule: str
) -> None:
    placements = ("chain", "looped", "reversed", "automatic")
    check(
        pool,
        "sequential",
        [
            Setup(stages, microbatches, placement, schedule)
            for microbatches, placement in itertools.product(MICROBATCHES, placements)
        ],
    )


@pytest.mark.parametrize("name", ["sequential", "skips", "tied weights"])
def test_twenty_steps_keep_the_losses(pool: Pools, name: str) -> None:
    check(
        pool,
        name,
        [
            Setup(2, 4, "chain", "interleaved", steps=20),
            Setup(2, 8, "looped", "simple", steps=20),
            Setup(4, 4, "automatic", "interleaved", steps=20),
        ],
    )


def test_an_order_that_is_searched_for_in_a_v_trains_like_plain_pytorch(pool: Pools) -> None:
    check(pool, "sequential", [Setup(2, 4, "automatic", "searched v", steps=4)])


def test_one_microbatch_along_a_chain_is_bitwise_equal(pool: Pools) -> None:
    for name, stages in itertools.product(["sequential", "nested"], [2, 3]):
        wrong = compare(pool, "wiring", find("wiring", name), Setup(stages, 1, "chain", steps=20), exact=True)
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "config",
    [
        {"active_microbatches": 1},
        {"active_microbatches": 2},
        {"deterministic_server": True},
        {"optimize": "speed"},
        {"memory_weight": 1.0},
    ],
    ids=str,
)
def test_settings_change_no_results(pool: Pools, config: dict[str, Any]) -> None:
    check(
        pool,
        "skips",
        [
            Setup(2, 8, "looped", "interleaved", config=config),
            Setup(2, 8, "chain", "simple", config=config),
            Setup(4, 8, "chain", "interleaved", config=config),
        ],
    )


@pytest.mark.parametrize("name", ["sequential", "skips", "modules used twice"])
def test_two_replicas_of_two_stages_train_like_one_process(pool: Pools, name: str) -> None:
    check(
        pool,
        name,
        [
            Setup(2, microbatches, placement, schedule, replicas=2)
            for microbatches, placement, schedule in itertools.product(
                (1, 4), ("chain", "looped", "automatic"), SCHEDULES
            )
        ],
    )


@pytest.mark.parametrize("name", ["two backwards", "generator and discriminator", "retained graph"])
def test_replicas_average_the_gradients_of_every_backward_of_a_step(pool: Pools, name: str) -> None:
    setups = [
        Setup(stages, microbatches, placement, replicas=2)
        for microbatches, (stages, placement) in itertools.product(
            (1, 4), ((1, "automatic"), (2, "chain"), (2, "looped"))
        )
    ]
    check(pool, name, setups, family="calls")


def test_microbatches_take_turns_also_where_a_rank_has_no_part_in_a_backward(pool: Pools) -> None:
    setups = [Setup(4, 2, "chain", schedule, replicas=2) for schedule in SCHEDULES]
    check(pool, "generator and discriminator", setups, family="calls")


def test_replicas_average_gradients_that_only_some_microbatches_of_some_replicas_have(pool: Pools) -> None:
    setups = [
        Setup(stages, microbatches, placement, replicas=2, steps=4)
        for microbatches, (stages, placement) in itertools.product(
            (1, 4), ((1, "automatic"), (2, "looped"), (2, "a stage of its own"))
        )
    ]
    check(pool, "branch that some microbatches take", setups, family="branches")


def test_gloo_carries_pipelines_too(pool: Pools) -> None:
    setups = [
        Setup(2, microbatches, placement, schedule, backend="gloo")
        for microbatches, placement, schedule in itertools.product(
            (1, 4), ("chain", "looped", "reversed"), SCHEDULES
        )
    ]
    check(pool, "skips", setups)


# --- steps of many shapes --------------------------------------------------------------------------------


class Net(nn.Module):
    """Two halves with dropout, so that train and eval differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.drop(self.first(x)))
        return out


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


@contextlib.contextmanager
def pipeline(microbatches: int = 2, **config: Any) -> Iterator[Any]:
    """A ``DistributedModel`` of :class:`Net` with its second half on stage 1."""
    smp.shutdown()
    by_hand = {"auto_partition": False, "default_partition": 0}
    smp.init({"partitions": 2, "microbatches": microbatches, **by_hand, **config})
    try:
        net = make_net()
        smp.set_partition(net.second, 1)
        yield smp.DistributedModel(net)
    finally:
        smp.shutdown()


def train_and_evaluate() -> None:
    """Step functions of three kinds take turns; batches change their size."""
    with pipeline() as model:

        @smp.step
        def train_step(x: Tensor, y: Tensor) -> dict[str, Any]:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            model.backward(loss)
            return {"loss": loss, "parts": (logits, [loss.item()]), "rows": len(x)}

        @smp.step()
        def test_step(x: Tensor) -> Tensor:
            out: Tensor = model(x)
            return out

        @smp.step(non_split_inputs=["scale"], detach_outputs=False)
        def other_step(x: Tensor, scale: Tensor) -> float:
            loss: Tensor = (model(x) * scale).pow(2).mean()
            model.backward(loss)
            return loss.item()

        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain = make_net().eval()
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step, rows in enumerate([8, 8, 4, 2, 8]):  # the last batch of an epoch is smaller
            x, y = classify(step, rows)
            model.eval()
            with torch.no_grad():
                before = test_step(x)
            torch.testing.assert_close(before.concat(), plain(x), rtol=1e-6, atol=1e-6)
            optimizer.zero_grad()
            out = train_step(x, y)
            values = other_step(x, torch.full((CLASSES,), 0.5))
            optimizer.step()
            plain_optimizer.zero_grad()
            logits = plain(x)
            loss = F.cross_entropy(logits, y)
            torch.autograd.backward(loss + (logits * 0.5).pow(2).mean())
            plain_optimizer.step()
            torch.testing.assert_close(out["loss"].reduce_mean(), loss.detach(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(out["parts"][0].concat(), logits.detach(), rtol=1e-6, atol=1e-6)
            assert out["rows"] == [rows // 2] * 2 and len(values) == 2
            assert out["parts"][1] == [[output.item() for output in out["loss"].outputs]]
            assert not out["loss"].outputs[0].requires_grad
        whole = model.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-6, atol=1e-6)


def only_forward() -> None:
    """Steps that never go backward, in any mode, with and without gradients recorded."""
    with pipeline(microbatches=4, pipeline="simple") as model:

        @smp.step
        def test_step(x: Tensor, y: Tensor) -> tuple[Tensor, int, float]:
            logits = model(x)
            right = logits.argmax(1).eq(y).sum().item()
            return logits, right, F.cross_entropy(logits, y, reduction="sum").item()

        plain = make_net().eval()
        model.eval()
        for step in range(3):
            x, y = classify(step, ROWS)
            wanted = plain(x).detach()
            with torch.set_grad_enabled(step == 1):
                logits, right, losses = test_step(x, y)
            torch.testing.assert_close(logits.concat(), wanted)
            assert sum(right) == int(wanted.argmax(1).eq(y).sum())
            assert abs(sum(losses) - F.cross_entropy(wanted, y, reduction="sum").item()) < 1e-4
            with torch.inference_mode():
                torch.testing.assert_close(test_step(x, y)[0].concat(), wanted)
        assert all(parameter.grad is None for parameter in model.local_parameters())


def first_rank_feeds_all() -> None:
    """Other ranks give empty or other tensors: those of the first stage count."""
    for empty in (True, False):
        with pipeline() as model:

            @smp.step
            def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
                loss = F.cross_entropy(model(x), y)
                model.backward(loss)
                return loss

            model.eval()
            for step in range(2):
                x, y = classify(step, ROWS)
                wanted = F.cross_entropy(make_net().eval()(x), y).detach()
                if smp.pp_rank() > 0:
                    x, y = (x[:, :0], y[:0]) if empty else (x + 1, y * 0)
                found = train_step(model, x, y).reduce_mean()
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def misuse() -> list[str]:
    told = []
    with pipeline(microbatches=3) as model:
        step = smp.step(lambda x: model(x))
        told.append(_told(ValueError, lambda: step(torch.ones(8, WIDTH))))
        assert step(torch.ones(6, WIDTH)).concat().shape == (6, CLASSES)  # nothing is broken by it
        told.append(_told(RuntimeError, lambda: model(torch.ones(1, WIDTH))))
        told.append(_told(RuntimeError, lambda: model.backward(torch.ones(()))))
        told.append(_told(ValueError, lambda: smp.set_partition(model.module.first, 1)))
    return told


def backward_of_what_is_not_trained() -> str:
    with pipeline() as model:

        @smp.step
        def evaluate(x: Tensor) -> Tensor:
            loss: Tensor = model(x).sum()
            model.backward(loss)
            return loss

        with torch.no_grad():
            told = _told(Exception, lambda: evaluate(torch.ones(4, WIDTH)))
    dist.destroy_process_group()  # there may be messages left in it
    return told


def cleared_inside_the_step(name: str, microbatches: int, wrapped: bool) -> str:
    """A step function may clear the gradients of a single microbatch; of several it would lose some."""
    with pipeline(microbatches) as model:
        model.eval()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if wrapped:
            optimizer = smp.DistributedOptimizer(optimizer)
        owner, _, method = name.partition(".")
        owning = model if owner == "model" else optimizer

        @smp.step
        def train_step(x: Tensor) -> Tensor:
            getattr(owning, method)()
            loss: Tensor = model(x).square().mean()
            model.backward(loss)
            return loss

        if microbatches > 1:
            told = _told(RuntimeError, lambda: train_step(torch.ones(4, WIDTH)))
            dist.destroy_process_group()  # there may be messages left in it
            return told
        train_step(torch.ones(4, WIDTH))
        train_step(torch.ones(4, WIDTH))
        plain = make_net().eval()
        plain(torch.ones(4, WIDTH)).square().mean().backward()
        wanted = dict(plain.named_parameters())
        for weight, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[weight].grad)
    return ""


def autocast_around_the_first_step() -> None:
    with pipeline(auto_partition=True) as model, torch.autocast("cpu", dtype=torch.bfloat16):
        model.eval()
        found = smp.step(lambda x: model(x).float())(torch.ones(4, WIDTH)).concat()
        wanted = make_net().eval()(torch.ones(4, WIDTH)).float()
    torch.testing.assert_close(found, wanted.detach(), rtol=0.02, atol=0.02)


def error_of_the_user(everywhere: bool) -> str:
    """A step function raises, on all ranks or on the first one alone."""
    with pipeline() as model:

        @smp.step
        def train_step(x: Tensor) -> Tensor:
            if everywhere or smp.pp_rank() == 0:
                raise KeyError("the user's mistake")
            logits: Tensor = model(x)
            return logits.sum()

        told = _told(Exception, lambda: train_step(torch.ones(4, WIDTH)))
    dist.destroy_process_group()  # there may be messages left in it
    return told


def what_lives_where() -> None:
    """Remote parameters have no data; optimizer, state dicts and local_* know."""
    with pipeline() as model:
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        seen = []
        model.register_post_partition_hook(lambda m, o: seen.append(dict(m.local_named_parameters())))

        @smp.step
        def train_step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            model.backward(loss)
            return loss

        train_step(*classify(0, ROWS))
        optimizer.step()
        local = {"first.0.weight", "first.0.bias"} if smp.pp_rank() == 0 else {"second.weight", "second.bias"}
        assert seen and set(seen[0]) == local == set(dict(model.local_named_parameters()))
        for name, parameter in model.module.named_parameters():
            assert (parameter.untyped_storage().nbytes() > 0) == (name in local), name
            assert parameter.shape == dict(make_net().named_parameters())[name].shape
            assert name in local or parameter.grad is None
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(local)
        assert len(optimizer.state_dict()["state"]) == 4
        whole = model.state_dict()
        fresh = make_net()
        assert not torch.equal(whole["second.weight"], fresh.second.weight)
        model.load_state_dict(fresh.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(value, fresh.state_dict()[name])


def scaled() -> None:
    """A GradScaler, clipping and a scheduler around a pipeline."""
    with pipeline(microbatches=4) as model:
        model.eval()
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        scaler = smp.amp.GradScaler(device="cpu", init_scale=64.0)

        @smp.step
        def train_step(x: Tensor, y: Tensor, factor: float) -> Tensor:
            loss: Tensor = F.cross_entropy(model(x), y) * factor
            model.backward(scaler.scale(loss))
            return loss

        for step, factor in enumerate([1.0, float("inf"), 1.0]):
            optimizer.zero_grad()
            train_step(*classify(step, ROWS), factor)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        assert scaler.get_scale() == 32.0
        plain = make_net().eval()
        for step, rate in ((0, 0.1), (2, 0.05)):
            plain.zero_grad()
            x, y = classify(step, ROWS)
            torch.autograd.backward(F.cross_entropy(plain(x), y))
            with torch.no_grad():
                for parameter in plain.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=rate)
        wanted = dict(plain.named_parameters())
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter, wanted[name], rtol=1e-5, atol=1e-6)


def whole_loop_inside_the_step() -> None:
    with pipeline(microbatches=1, auto_partition=True) as model:
        model.eval()
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))

        @smp.step
        def train_step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x), y))
            optimizer.step()

        plain = make_net().eval()
        plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
        for step in range(3):
            x, y = classify(step, ROWS)
            train_step(x, y)
            plain_optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(plain(x), y))
            plain_optimizer.step()
        wanted = dict(plain.named_parameters())
        local = dict(model.local_named_parameters())
        assert 0 < len(local) < len(wanted)
        for name, value in local.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


def other_models_optimizer() -> None:
    """What a step does with parameters that are not the model's is its own matter."""
    with pipeline(microbatches=2) as model:
        weight = nn.Parameter(torch.ones(3))
        other = torch.optim.SGD([weight], lr=1.0)

        @smp.step
        def train_step(x: Tensor) -> None:
            weight.grad = torch.ones(3)
            other.step()
            other.zero_grad()
            model.backward(model(x).square().mean())

        train_step(torch.ones(4, WIDTH))
        assert weight.tolist() == [-1.0] * 3 and weight.grad is None


def _told(kind: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"no {kind.__name__}")


@pytest.mark.parametrize(
    "function",
    [
        train_and_evaluate,
        only_forward,
        first_rank_feeds_all,
        what_lives_where,
        scaled,
        autocast_around_the_first_step,
        other_models_optimizer,
        whole_loop_inside_the_step,
    ],
)
def test_steps_of_a_pipeline(pool: Pools, function: Callable[[], None]) -> None:
    pool(2).run(function)


def test_misuse_is_told_and_breaks_nothing(pool: Pools) -> None:
    for uneven, forward, backward, late in pool(2).run(misuse):
        assert "3 microbatches do not divide" in uneven
        assert "outside a step" in forward and "outside a step" in backward
        assert "partitioned already" in late


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("name", ["optimizer.zero_grad", "model.zero_grad", "optimizer.step"])
def test_gradients_are_not_cleared_between_microbatches(pool: Pools, name: str, wrapped: bool) -> None:
    if name != "optimizer.step":
        pool(2).run(cleared_inside_the_step, name, 1, wrapped)
    for told in pool(2).run(cleared_inside_the_step, name, 2, wrapped):
        assert f"{name} was called inside a smp.step function, which runs for each of 2" in told


def test_a_backward_without_anything_trained_is_an_error_on_all_ranks(pool: Pools) -> None:
    for told in pool(2).run(backward_of_what_is_not_trained):
        assert "ran under torch.no_grad(), or nothing that it used is trained" in told


def test_an_error_of_the_step_function_reaches_all_ranks(pool: Pools) -> None:
    for told in pool(2).run(error_of_the_user, True):
        assert "the user's mistake" in told
    first, second = pool(2).run(error_of_the_user, False)
    assert "the user's mistake" in first
    assert "rank 0" in second

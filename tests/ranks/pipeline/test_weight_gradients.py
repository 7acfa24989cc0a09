"""Backwards in two parts: gradients for other ranks first, those of weights when a rank is free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.runtime.backward.weight_gradients import WeightGradients, first_part
from opensmd.modelparallel.runtime.messages.mailbox_transport import MailboxTransport
from opensmd.modelparallel.runtime.messages.message import Kind, gradient_messages, make_tag
from opensmd.modelparallel.runtime.turns.record import Record
from tests.support.partitioned import restart
from tests.support.ranks import RankPool

WIDTH = 6
Forward = Callable[[nn.Module, Tensor], Tensor]


class Double(torch.autograd.Function):
    """A node of Python in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def mlp(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8, **options), nn.ReLU(), nn.Linear(8, WIDTH, **options))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def with_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.LayerNorm(WIDTH))


class Attentive(nn.Module):
    """Attention over positions that are embedded; the last layer is a product again."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(4, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.positions(torch.arange(4)))[None]
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class Recurrent(nn.Module):
    """A layer that goes through the rows."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x[:, None])[0]
        return out


class Scaled(nn.Module):
    """A weight that a function of the script computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * Double.apply(self.weight)  # type: ignore[no-any-return, no-untyped-call]


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def hooked(hook: Callable[[nn.Sequential], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = mlp()
        hook(module)
        return module

    return build


def nothing(*_: Any) -> None:
    return None


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = module(x)
    return out


def twice(module: nn.Module, x: Tensor) -> Tensor:
    return plainly(module, plainly(module, x))


def also_elsewhere(module: nn.Module, x: Tensor) -> Tensor:
    """The last layer's weight is used by something that does not wait."""
    assert isinstance(module, nn.Sequential)
    return plainly(module, x) * module[2].weight.sum()


def written_in_place(module: nn.Module, x: Tensor) -> Tensor:
    """What is written through a view comes from weights alone."""
    assert isinstance(module, nn.Sequential)
    hidden = x.clone()
    hidden[:, 0] = module[0].weight.sum()
    hidden[0] = module[2].bias
    return plainly(module, hidden)


def through_python(module: nn.Module, x: Tensor) -> Tensor:
    return plainly(module, Double.apply(x))  # type: ignore[no-untyped-call]


def with_saved_tensors_hooks(module: nn.Module, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return plainly(module, x)


def checkpointed(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(module, x, use_reentrant=False)
    return out


def in_bfloat16(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plainly(module, x).float()


def retaining(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, nn.Sequential)
    hidden = module[0](x)
    hidden.retain_grad()
    return plainly(module[1:], hidden)


def listening(module: nn.Module, x: Tensor) -> Tensor:
    out = plainly(module, x)
    assert out.grad_fn is not None
    out.grad_fn.register_hook(nothing)
    return out


@dataclass(frozen=True)
class Case:
    """Which parameters wait; an empty set where the backward is not split at all."""

    build: Callable[[], nn.Module]
    waiting: frozenset[str]
    forward: Forward = plainly


def waiting(*names: str) -> frozenset[str]:
    return frozenset(names)


BOTH = waiting("0.weight", "0.bias", "2.weight", "2.bias")
CASES = {
    "layers": Case(mlp, BOTH),
    "no bias": Case(lambda: mlp(bias=False), waiting("0.weight", "2.weight")),
    "convolutions": Case(convolutions, waiting("1.weight", "1.bias", "4.weight", "4.bias")),
    "a weight that is computed": Case(
        with_norm,
        waiting("0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"),
    ),
    "embedded positions and attention": Case(
        Attentive,
        waiting(
            "positions.weight",
            *(f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias")),
            *(f"attention.out_proj.{name}" for name in ("weight", "bias")),
        ),
    ),
    "a recurrent kernel": Case(lambda: Recurrent(nn.LSTM), waiting()),
    "recurrent products": Case(
        lambda: Recurrent(nn.GRU),
        waiting(*(f"layer.{kind}_{of}_l0" for kind in ("weight", "bias") for of in ("ih", "hh"))),
    ),
    "a custom function of a weight": Case(Scaled, waiting("weight")),
    "autocast": Case(mlp, BOTH, in_bfloat16),
    "used twice": Case(mlp, BOTH, twice),
    "also used elsewhere": Case(mlp, BOTH, also_elsewhere),
    "written in place": Case(mlp, waiting("0.weight", "0.bias", "2.weight"), written_in_place),
    "retained gradient": Case(mlp, waiting("0.weight", "2.weight", "2.bias"), retaining),
    "hook on a node": Case(mlp, waiting("0.weight", "0.bias", "2.weight"), listening),
    "hook on a weight": Case(
        hooked(lambda module: module[0].weight.register_hook(nothing)), waiting("2.weight", "2.bias")
    ),
    "hook after a weight's gradient": Case(
        hooked(lambda module: module[0].weight.register_post_accumulate_grad_hook(nothing)),
        waiting("2.weight", "2.bias"),
    ),
    "hook on a module": Case(hooked(lambda module: module[0].register_full_backward_hook(nothing)), BOTH),
    "frozen": Case(frozen, waiting()),
    "python in the graph": Case(mlp, BOTH, through_python),
    "saved tensors hooks": Case(mlp, waiting(), with_saved_tensors_hooks),
    "checkpoint": Case(mlp, waiting(), checkpointed),
}


def make(case: Case) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return case.build(), torch.randn(4, WIDTH)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def run_case(
    name: str, anomaly: bool = False, everything: bool = False, in_autocast: bool = False
) -> tuple[set[str], bool] | None:
    """Rank 0 sends the input and gets its gradient; rank 1 says what waited, and if all is equal."""
    case = CASES[name]
    tag, back = make_tag(Kind.TENSOR, 0, 1), make_tag(Kind.GRADIENT, 0, 1)
    group = dist.group.WORLD
    assert group is not None
    transport = MailboxTransport(group)
    reference, x = make(case)
    leaf = x.clone().requires_grad_()
    F.mse_loss(case.forward(reference, leaf), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    if dist.get_rank() == 0:
        transport.send(1, tag, x)
        transport.wait_any(gradient_messages(1, back))
        assert leaf.grad is not None
        torch.testing.assert_close(transport.receive(1, back, x.numel(), x.dtype).view_as(x), leaf.grad)
        dist.barrier()
        return None
    module, _ = make(case)
    received, token = transport.receive_edge(
        transport.receive(0, tag, x.numel(), x.dtype).view_as(x), 0, back
    )
    loss = F.mse_loss(case.forward(module, received), torch.zeros(()))
    record = Record()
    left = WeightGradients(record)
    roots, given = [loss, token], [torch.ones(()), token.detach()]
    with torch.autograd.set_detect_anomaly(anomaly):
        part = first_part(roots, given, everything=everything)
    split = part is not None
    if split:
        assert not gradients(module)  # nothing has run
        left.run_first(0, 0, part)
        assert not everything or not part.leaves_everything or not gradients(module)
    else:
        torch.autograd.backward(roots, given)
    dist.barrier()  # rank 0 has its gradient
    before = gradients(module)
    missed = gradients(reference).keys() - before.keys()
    with torch.autocast("cpu", torch.bfloat16, enabled=in_autocast):
        left.run_all()
    after = gradients(module)
    assert after.keys() == gradients(reference).keys()
    assert {stretch.kind for stretch in record.stretches} == ({"weights"} if split else set())
    if split:
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.backward(loss)
    return set(missed), all(torch.equal(each, after[name]) for name, each in gradients(reference).items())


@pytest.mark.parametrize("name", CASES)
def test_weights_wait_where_nobody_notices(pool: Callable[[int], RankPool], name: str) -> None:
    found = pool(2).run(run_case, name, backend="smddp")[1]
    assert found == (CASES[name].waiting, True)


def test_weights_that_wait_are_computed_as_outside_of_an_autocast_that_has_begun_since(
    pool: Callable[[int], RankPool],
) -> None:
    found = pool(2).run(run_case, "layers", False, False, True, backend="smddp")[1]
    assert found == (CASES["layers"].waiting, True)


def test_nothing_waits_while_torch_looks_for_anomalies(pool: Callable[[int], RankPool]) -> None:
    assert pool(2).run(run_case, "layers", True, backend="smddp")[1] == (set(), True)


# --- in steps --------------------------------------------------------------------------------------------


def train(
    settings: dict[str, Any], read: bool = False, forward: Forward = plainly
) -> tuple[list[float], list[str], list[bool]]:
    """Losses, what this rank did in the last step, and whether every gradient equals plain PyTorch's."""
    restart(
        **{"partitions": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0, **settings}
    )
    torch.manual_seed(0)
    plain = nn.Sequential(*[mlp() for _ in range(2)])
    torch.manual_seed(0)
    module = nn.Sequential(*[mlp() for _ in range(2)])
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    seen: list[float] = []

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = forward(model, x).square().mean()
        model.backward(loss)
        if read:
            gradient = module[1][2].weight.grad
            assert gradient is not None
            seen.append(float(gradient.abs().sum()))
        return loss

    losses, equal = [], []
    for _ in range(3):
        x = torch.randn(8 * smp.dp_size(), WIDTH, generator=generator)
        mine = x.chunk(smp.dp_size())[smp.dp_rank()]
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        loss = step(mine).reduce_mean()
        expected = forward(plain, x).square().mean()
        expected.backward()
        losses.append(float(loss) - float(expected) if smp.dp_size() == 1 else 0.0)
        for (_, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
            if ours.grad is not None:
                equal.append(torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7))
        optimizer.step()
        plain_optimizer.step()
    if read:
        assert len(set(seen[-4:])) == 4  # each microbatch added to it before it was read
    assert model._engine is not None
    return losses, [stretch.kind for stretch in model._engine.record], equal


def check_training(
    found: list[tuple[list[float], list[str], list[bool]]], waits: Callable[[int], int]
) -> None:
    for rank, (losses, kinds, equal) in enumerate(found):
        assert all(abs(each) < 1e-6 for each in losses)
        assert equal and all(equal)
        assert kinds.count("weights") == waits(rank)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2),
        ({"active_microbatches": 1}, 1),
        ({"pipeline": "zero_bubble"}, 4),
        ({"pipeline": "simple"}, 2),
        ({"pipeline": "1f1b"}, 0),
        ({"deterministic_server": True}, 4),
        ({"microbatches": 1}, 0),
    ],
    ids=str,
)
def test_microbatches_of_the_last_stage_leave_their_weight_gradients_for_later(
    pool: Callable[[int], RankPool], settings: dict[str, Any], expected: int
) -> None:
    check_training(pool(2).run(train, settings, backend="smddp"), lambda rank: expected if rank == 1 else 0)


@pytest.mark.parametrize("settings", [{}, {"pipeline": "zero_bubble"}, {"pipeline": "searched"}], ids=str)
def test_over_gloo_the_last_stage_leaves_them_too(
    pool: Callable[[int], RankPool], settings: dict[str, Any]
) -> None:
    """In a fixed order, as messages of Gloo come in one."""
    check_training(pool(2).run(train, settings, backend="gloo"), lambda rank: 4 if rank == 1 else 0)


def test_replicas_leave_weight_gradients_for_later(
    pool: Callable[[int], RankPool],
) -> None:
    settings = {"ddp": True, "placement_strategy": "spread", "pipeline": "zero_bubble"}
    found = pool(4).run(train, settings, backend="smddp")
    assert sorted(kinds.count("weights") for _, kinds, _ in found) == [0, 0, 4, 4]
    check_training(found, lambda rank: found[rank][1].count("weights"))


def test_a_step_function_that_looks_at_a_gradient_sees_all_of_it(pool: Callable[[int], RankPool]) -> None:
    found = pool(2).run(train, {}, True, backend="smddp")
    check_training(found, lambda rank: found[rank][1].count("weights"))

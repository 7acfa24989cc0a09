"""Parameters that are initialised in the first step, where they live: values and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.init import shutdown
from tests.support.live_tensors import LiveTensors
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
WIDTH, LAYERS, ROWS, STEPS = 48, 24, 4, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.trunc_normal_(self.linear.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class AskingLayer(Layer):
    """One that asks for numbers of parameters when it is made, and for those of its input in forward."""

    ways: ClassVar[dict[str, Callable[[Tensor], float]]] = {
        "item": lambda x: x.abs().max().item(),
        "tolist": lambda x: sum(x.flatten().tolist()),
        "numpy": lambda x: float(x.detach().numpy().mean()),
        "condition": lambda x: 0.5 if x.sum() > 0 else 1.5,
        "float": lambda x: float(x.mean()),
    }

    def __init__(self, way: str) -> None:
        super().__init__()
        self.ask = self.ways[way]
        with torch.no_grad():
            self.linear.weight.mul_(1 / (1 + abs(self.ask(self.linear.weight.detach()))))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + 0.01 * self.ask(x.detach())))


class Net(nn.Module):
    """An embedding that is the head's weight, too, and what initialises itself in other ways."""

    mask: Tensor

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.apply(self.initialise)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(64, WIDTH).tril())

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(0, 0.02)
            module.weight[1:3] = 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.mask.mean(0)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(*, context: Any = None, make: Callable[[], nn.Module] = Net) -> dict[str, Any]:
    """Losses and state dict of a model made in ``context`` with smp, and what was drawn after it."""
    torch.manual_seed(smp.dp_rank())  # the first replica's values are everybody's
    live = LiveTensors()
    with live:
        with context or contextlib.nullcontext():
            net = make()
        drawn = torch.rand(1).item()
        wrapped = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
        made: dict[str, Any] = {}

        @smp.step
        def step(x: Tensor) -> Tensor:
            loss = F.cross_entropy(wrapped(x).float().flatten(0, 1), x.flatten())
            wrapped.backward(loss)
            return loss

        wrapped.register_post_partition_hook(lambda *_: made.update(most=live.most))
        losses = []
        for number in range(STEPS):
            optimizer.zero_grad()
            torch.manual_seed(100 + number)
            losses.append(step(torch.randint(64, (ROWS, 5))).reduce_mean().item())
            optimizer.step()
    return {"drawn": drawn, "losses": losses, "state": wrapped.state_dict(), "most": made["most"]}


def whole_bytes() -> int:
    return sum(parameter.nbytes for parameter in Net().parameters())


def init(**settings: Any) -> None:
    shutdown()
    smp.init(
        {
            "partitions": 2,
            "microbatches": 2,
            "ddp": True,
            "delayed_parameter_initialization": True,
            **settings,
        }
    )


def same_as_without(settings: dict[str, Any], context: Callable[[], Any]) -> None:
    init(**settings)
    plain = train()
    init(**settings)
    delayed = train(context=context())
    assert delayed["drawn"] == plain["drawn"]
    assert delayed["losses"] == plain["losses"]
    for name, value in plain["state"].items():
        assert torch.equal(value, delayed["state"][name]), name
    assert plain["most"] > whole_bytes()
    # what a rank has, and a few parameters while they are drawn
    assert delayed["most"] < 0.85 * whole_bytes(), (delayed["most"], plain["most"], whole_bytes())


def asking(way: str) -> Net:
    net = Net(layers=2)
    net.layers.extend([AskingLayer(way), AskingLayer(way)])
    return net


def same_where_numbers_are_asked_for(way: str) -> None:
    init()
    plain = train(make=lambda: asking(way))
    init()
    delayed = train(context=smp.model_creation(), make=lambda: asking(way))
    assert delayed["drawn"] == plain["drawn"]
    torch.testing.assert_close(delayed["losses"], plain["losses"])  # the cut may be another
    torch.testing.assert_close(delayed["state"], plain["state"])


def before_the_first_step() -> None:
    init()
    torch.manual_seed(0)
    saved = Net().state_dict()
    torch.manual_seed(1)
    with smp.delay_param_initialization():
        net = Net()
    weight = net.layers[0].linear.weight
    assert (weight.device.type, weight.shape, weight.numel()) == ("cpu", (WIDTH, WIDTH), WIDTH**2)
    with pytest.raises(SMPUnsupportedError, match="initialization is delayed until the first call"):
        nn.init.zeros_(weight)
    model = smp.DistributedModel(net)
    with pytest.raises(SMPError, match="before the first step"):
        model.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for head"):
        model.load_state_dict({**saved, "head.weight": torch.ones(3)})
    with pytest.raises(RuntimeError, match=r"missing keys \['head.weight'\]"):
        model.load_state_dict({name: each for name, each in saved.items() if name != "head.weight"})
    assert model.load_state_dict(saved).missing_keys == []

    @smp.step
    def step(x: Tensor) -> Tensor:
        return model(x).sum()

    step(torch.ones(2, 3, dtype=torch.long))
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name
    model.load_state_dict({name: each + 1 for name, each in saved.items()})
    assert torch.equal(model.state_dict()["head.weight"], saved["head.weight"] + 1)


def changed_before_it_was_loaded() -> None:
    init(partitions=1)
    saved = Net().state_dict()
    with smp.delay_param_initialization():
        model = smp.DistributedModel(Net())
    model.load_state_dict(saved)
    saved["layers.0.norm.bias"].add_(1)
    with pytest.raises(SMPError, match="have been changed before the first step"):
        smp.step(lambda x: model(x).sum())(torch.ones(2, 3, dtype=torch.long))
    dist.barrier()


def test_delayed_parameters_get_the_same_values_where_they_live_and_no_rank_has_them_all(pool: Pools) -> None:
    pool(2).run(same_as_without, {}, smp.delay_param_initialization)
    pool(2).run(same_as_without, {"fp16": True}, smp.model_creation)
    pool(4).run(same_as_without, {"placement_strategy": "spread"}, smp.model_creation)


def test_delayed_parameters_refuse_access_and_take_state_dicts_before_the_first_step(pool: Pools) -> None:
    pool(2).run(before_the_first_step)
    pool(2).run(changed_before_it_was_loaded)


@pytest.mark.parametrize("way", AskingLayer.ways)
def test_modules_may_ask_for_numbers_when_they_are_made_and_in_forward(pool: Pools, way: str) -> None:
    pool(2).run(same_where_numbers_are_asked_for, way)

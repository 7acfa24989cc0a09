"""What a script may pass to a step and ask of its model, through the public names, over two partitions."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import PeerFailed
from opensmd.modelparallel.state_dicts.whereabouts import Whereabouts
from tests.support.ranks import RankPool

Point = collections.namedtuple("Point", "x y")


class Net(nn.Module):
    """Layers to cut, with a buffer, a factor from outside, and a result in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 3)

    def forward(self, x: Tensor, factor: Tensor) -> dict[str, Any]:
        hidden = self.norm(torch.tanh(self.first(x))) * factor
        hidden = torch.tanh(self.second(hidden))
        return {"logits": self.third(hidden), "more": (hidden, [hidden.sum(1)])}


class Rows:
    """Cuts itself, as the interface lets any object do."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Rows:
        """The piece of one microbatch."""
        return Rows(self.rows.tensor_split(num_mb, axis)[mb])


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 6, generator=generator)
    return x, torch.randint(3, (8,), generator=generator), torch.rand(16, generator=generator)


def plain() -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of two microbatches of four rows, and the gradients of the mean of their losses."""
    model = net()
    x, y, factor = batch()
    logits = [model(part, factor)["logits"] for part in x.chunk(2)]
    losses = [F.cross_entropy(logit, target) for logit, target in zip(logits, y.chunk(2), strict=True)]
    torch.stack(losses).mean().backward()
    return [logit.detach() for logit in logits], {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


def arguments_of_every_kind() -> None:
    smp.init({"partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(net())
    x, y, factor = batch()

    @smp.step(non_split_inputs=["factor"], input_split_axes={"turned": 1}, detach_outputs=False)
    def step(
        given: dict[str, Tensor],
        turned: Tensor,
        factor: Tensor,
        *,
        rows: Rows,
        point: Point,
        members: set[Tensor],
        word: str = "w",
    ) -> Any:
        (member,) = members
        assert given["x"].shape == (4, 6) == point.x.shape and turned.shape == (6, 4) and point.y == 7
        assert rows.rows.equal(given["x"]) and member.equal(given["y"]) and turned.T.equal(given["x"])
        out = model(given["x"], factor=factor)
        loss = F.cross_entropy(out["logits"], given["y"])
        model.backward(loss)
        return out, {"word": word, "loss": [loss.item()]}, Point(loss, None)

    given = {"x": x, "y": y}
    out, told, point = step(given, x.T, factor, rows=Rows(x), point=Point(x, 7), members={y})
    wanted, gradients = plain()
    torch.testing.assert_close(out["logits"].outputs, wanted)
    assert type(out["more"]) is tuple and out["more"][1][0].concat().shape == (8,)
    assert type(point) is Point and point.y == [None, None]
    assert told["word"] == ["w", "w"]
    assert told["loss"] == [[output.item() for output in point.x.outputs]]
    assert point.x.reduce_sum().item() == pytest.approx(sum(told["loss"][0]))
    assert point.x.detach().stack().tolist() == point.x.concat().tolist()
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


def answers_of_later_versions() -> None:
    """Nothing is split by tensor parallelism, and every local parameter is reduced over the replicas."""
    smp.init({"partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(net())
    x, _, factor = batch()
    smp.step(non_split_inputs=["factor"])(lambda x, factor: model(x, factor)["logits"])(x, factor)
    assert list(model.distributed_modules()) == []
    for parameter in model.local_parameters():
        assert not model.is_distributed_parameter(parameter)
        assert not model.is_scaled_batch_parameter(parameter)
    for buffer in model.local_buffers():
        assert not model.is_distributed_buffer(buffer) and not model.is_scaled_batch_buffer(buffer)
    local = [name for name, _ in model.local_named_parameters()]
    assert [name for name, _ in model.default_reducer_named_parameters()] == local
    assert list(model.scaled_batch_reducer_named_parameters()) == []
    assert set(model.orig_state_dict()) == set(model.local_state_dict()) - {"_smp_is_partial"}
    assert smp.state.module_manager.translate_functions == []
    for group, size in (
        (smp.get_pp_process_group(), 2),
        (smp.get_tp_process_group(), 1),
        (smp.get_rdp_process_group(), 1),
    ):
        assert torch.distributed.get_world_size(group) == size
    assert smp.get_rdp_group() == smp.get_tp_group() == [smp.rank()]


def measured_plans() -> None:
    """However the dry run measures, it changes nothing in the training."""
    x, y, factor = batch()
    for options in ({"trace_execution_times": True}, {"trace_memory_usage": True}, {"trace_device": "cpu"}):
        smp.init({"partitions": 2, "microbatches": 2})
        model = smp.DistributedModel(net(), **options)

        @smp.step(non_split_inputs=["factor"])
        def step(model: Any, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
            logits = model(x, factor)["logits"]
            model.backward(F.cross_entropy(logits, y))
            return logits

        logits = step(model, x, y, factor)
        wanted, gradients = plain()
        torch.testing.assert_close(logits.outputs, wanted, msg=str(options))
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], msg=f"{options} {name}")
        smp.shutdown()


def levels_of_module() -> None:
    """Both ``model.module`` and ``model.module.module`` are the user's module, inside steps too."""
    smp.init({"partitions": 2, "microbatches": 2})
    whole = net()
    model = smp.DistributedModel(whole)
    x, y, factor = batch()

    @smp.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        scale = getattr(model.module.module, "scale", 1.0)
        logits = model.module(x, factor)["logits"] * scale
        model.backward(F.cross_entropy(logits, y))
        return logits

    logits = step(x, y)
    wanted, gradients = plain()
    torch.testing.assert_close(logits.outputs, wanted)
    for name, parameter in model.module.module.named_parameters():
        assert parameter is dict(whole.named_parameters())[name]
        if model.is_local(name):
            torch.testing.assert_close(parameter.grad, gradients[name], msg=name)
    assert model.module.module.state_dict().keys() == whole.state_dict().keys()
    model.module.scale = 2.0
    torch.testing.assert_close(step(x, y).outputs, [2 * one for one in wanted])


def plans_that_fail() -> None:
    """The rank that plans raises the cause, the other one that it was told so."""
    smp.init({"partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(net())
    x, _, factor = batch()
    mine = smp.rank() == 0
    told = (ValueError, "^no such layer$") if mine else (PeerFailed, r"rank 0 could not .*such layer")

    @smp.step
    def step(x: Tensor) -> None:
        model(x, factor)
        raise ValueError("no such layer")

    with pytest.raises(told[0], match=told[1]):
        step(x)


def everything() -> None:
    smp.shutdown()  # what an earlier test on these processes may have left
    for check in (
        arguments_of_every_kind,
        answers_of_later_versions,
        measured_plans,
        levels_of_module,
        plans_that_fail,
    ):
        check()
        smp.shutdown()


def test_steps_and_models_keep_their_interfaces_promises_over_two_partitions(
    pool: Callable[[int], RankPool],
) -> None:
    pool(2).run(everything)


def test_an_attribute_of_the_users_module_is_told_where_to_find_it() -> None:
    model = Whereabouts(nn.Linear(2, 2))
    with pytest.raises(AttributeError, match=r"the Linear in it has: use model\.module\.in_features"):
        _ = model.in_features
    with pytest.raises(AttributeError, match="object has no attribute 'generate'"):
        _ = model.generate


def timed_plans() -> list[bool | None]:
    """Whether the plan of a model of convolutions comes from a clock; None on ranks that did not make it."""
    found = []
    for options, settings in (
        ({}, {}),
        ({"trace_execution_times": False}, {}),
        ({}, {"deterministic_server": True}),
    ):
        smp.shutdown()
        smp.init({"partitions": 2, "microbatches": 2, **settings})
        torch.manual_seed(0)
        module, plain_module = pictures(), pictures()
        plain_module.load_state_dict(module.state_dict())
        model = smp.DistributedModel(module, **options)

        @smp.step
        def step(model: Any, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        loss = step(model, x).reduce_mean()
        torch.testing.assert_close(loss, plain_module(x).square().mean().detach())
        check = model._plan_check
        assert check is not None
        trace = check._first.trace
        found.append(None if trace is None else trace.measured)
    return found


def pictures() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 3))


def test_convolutions_are_timed_unless_a_script_wants_estimates_or_the_same_order(
    pool: Callable[[int], RankPool],
) -> None:
    assert pool(2).run(timed_plans, backend="smddp") == [[True, False, False], [None, None, None]]

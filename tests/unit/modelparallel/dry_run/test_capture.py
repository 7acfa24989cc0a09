"""The dry run: what it learns, and that it leaves no trace in the model."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from opensmd.modelparallel.dry_run.capture import capture, is_tracing
from opensmd.modelparallel.dry_run.module_tree import describe
from opensmd.modelparallel.planning.partition import partition
from opensmd.modelparallel.planning.trace import ModelTrace
from tests.support.planner_models import MODELS, gpt2, resnet


def best_split(trace: ModelTrace, plan_shared: list[list[int]], weight: float, stages: int) -> float:
    """The smallest worst stage over all contiguous splits; shared units ride with either end of a group."""
    seconds = np.array([unit.forward_seconds + unit.backward_seconds for unit in trace.units])
    memory = np.array(trace.training_bytes(2.0)) + [unit.activation_bytes for unit in trace.units]
    share = (1 - weight) * seconds / seconds.sum() + weight * memory / memory.sum()
    best = np.inf
    for leads in itertools.product(*[(group[0], group[-1]) for group in plan_shared]):
        moved = share.copy()
        for group, lead in zip(plan_shared, leads, strict=True):
            for unit in group:
                if unit != lead:
                    moved[lead] += share[unit]
                    moved[unit] = 0.0
        prefix = np.concatenate([[0.0], np.cumsum(moved)])
        cuts = np.array(list(itertools.combinations_with_replacement(range(len(prefix)), stages - 1)))
        edges = np.concatenate([np.zeros((len(cuts), 1), int), cuts, np.full((len(cuts), 1), len(share))], 1)
        best = min(best, float(np.diff(prefix[edges], axis=1).max(1).min()))
    return best


@functools.cache
def traced(name: str) -> tuple[ModelTrace, set[str]]:
    """The trace of a model, and the names of its modules."""
    model, call = MODELS[name]()
    names = {module for module, _ in model.named_modules(remove_duplicate=False)}
    # estimates: what is measured depends on the machine
    return capture(model, call, has_data=False), names


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("weight", [0.2, 0.8])
def test_real_models_are_split_within_five_percent_of_the_best(name: str, stages: int, weight: float) -> None:
    trace, names_in_model = traced(name)
    plan = partition(trace, stages, memory_weight=weight)
    groups: dict[int, set[int]] = {}
    for names in trace.shared:  # groups that share a unit are one
        units = {trace.anchors[trace.owner(one)] for one in names}
        for key in [key for key, group in groups.items() if group & units]:
            units |= groups.pop(key)
        groups[min(units)] = units
    best = best_split(trace, [sorted(group) for group in groups.values() if len(group) > 1], weight, stages)
    time_total = sum(load.seconds for load in plan.loads)
    memory_total = sum(load.memory_bytes for load in plan.loads)
    worst = max(
        (1 - weight) * load.seconds / time_total + weight * load.memory_bytes / memory_total
        for load in plan.loads
    )
    assert worst <= 1.05 * best
    assert set(plan.homes) == names_in_model
    for shared in plan.shared:
        assert len({plan.parameter_home(one) for one in shared.names}) == 1


@pytest.mark.parametrize("stages", [2, 4])
def test_stage_times_of_twelve_equal_layers_are_within_ten_percent(stages: int) -> None:
    trace = capture(*gpt2(layers=12, width=128), has_data=False)
    plan = partition(trace, stages, memory_weight=0.0, microbatches=8)
    times = [load.seconds for load in plan.loads]
    assert max(times) <= 1.10 * min(times)


def test_the_model_and_the_random_state_are_left_as_they_were() -> None:
    class Stateful(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.last: Tensor | None = None
            self.seen: list[Tensor] = []
            self.ready = False
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:  # as Hugging Face's models do when they are first asked for hidden states
                self.norm.register_forward_hook(lambda module, args, out: self.seen.append(out))
                self.ready = True
            self.last = x
            self.count = self.count + 1
            with torch.no_grad():  # as moving averages of weights do
                self.norm.bias.data = self.norm.bias.data + 1.0
                self.norm.weight.mul_(0.5)
            self.norm.bias.requires_grad = not self.norm.bias.requires_grad
            return F.dropout(self.norm(x))

    for needs_value in (False, True):
        model = Stateful()
        x = torch.randn(8, 4)
        model(x).sum().backward()
        model.norm._forward_hooks.clear()
        model.ready = False
        before = {name: value.clone() for name, value in model.state_dict().items()}
        gradient, last = model.norm.weight.grad, model.last
        assert gradient is not None
        kept = gradient.clone()
        state = torch.get_rng_state()

        def call(model: nn.Module = model, x: Tensor = x, needs_value: bool = needs_value) -> Any:
            loss = model(x).sum()
            loss.backward()
            return loss.item() if needs_value else loss

        capture(model, call)
        assert model.norm.weight.grad is gradient
        torch.testing.assert_close(gradient, kept, rtol=0, atol=0)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        assert model.last is last and not model.norm.bias.requires_grad
        assert torch.equal(torch.get_rng_state(), state)
        assert type(model.count) is Tensor
        assert not model.norm._forward_hooks
        assert len(model.seen) == 1 and type(model.seen[0]) is Tensor


def test_backward_and_an_optimizer_in_the_dry_run_change_nothing() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(2, 4)

    def forward() -> Tensor:
        loss: Tensor = model(x).sum()
        return loss

    def train() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(forward())
        optimizer.step()

    assert capture(model, train).units == capture(model, forward).units
    assert not optimizer.state
    torch.autograd.backward(forward())
    assert model[0].weight.grad is not None


def test_nothing_is_computed_unless_the_script_asks_for_a_value() -> None:
    model = nn.Linear(4, 4)
    seen: list[type] = []

    def call() -> Any:
        assert is_tracing()
        out = model(torch.ones(2, 4))
        seen.append(type(out))
        return out

    capture(model, call)
    assert [one.__name__ for one in seen] == ["FakeTensor"]
    seen.clear()
    capture(model, lambda: call().sum().item())
    assert [one.__name__ for one in seen] == ["FakeTensor", "Tensor"]
    assert not is_tracing()


def test_the_scripts_own_error_comes_through_and_tracing_ends() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        capture(model, lambda: model(torch.ones(2, 5)))
    assert not is_tracing()
    assert not model._forward_hooks


def test_a_step_that_reads_gradients_is_seen_up_to_there() -> None:
    model = nn.Linear(4, 4)

    def call() -> Tensor:
        model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.norm()

    assert capture(model, call).units
    assert not is_tracing() and not model._forward_hooks


def test_torch_logs_nothing_about_what_only_the_dry_run_cannot_do(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="cannot be multiplied"):
        capture(model, lambda: model(torch.ones(2, 3)))
    assert not [record for record in caplog.records if record.name.startswith("torch")]


class Copied(torch.autograd.Function):
    """Computes nothing that torch would see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        if not isinstance(x, FakeTensor):  # as an extension's kernel, which fake tensors do not reach
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Unseen(nn.Module):
    """A layer whose work is in a custom function, or in Python."""

    def __init__(self, seconds: float, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.seconds, self.kind = seconds, kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "function":
            return Copied.apply(x * self.weight, self.seconds)  # type: ignore[no-any-return]  # torch has no types
        time.sleep(self.seconds)
        return x * self.weight


@pytest.mark.usefixtures("sleeping_is_work")
@pytest.mark.parametrize("kind", ["function", "python"])
def test_work_that_estimates_cannot_see_is_timed(kind: str) -> None:
    model = nn.Sequential(*[Unseen(seconds, kind) for seconds in (0.030, 0.010, 0.010, 0.010)])
    x = torch.ones(2, 8, requires_grad=True)
    trace = capture(model, lambda: model(x).sum())
    assert trace.measured
    assert trace.units[0].forward_seconds == pytest.approx(0.030)
    plan = partition(trace, 2, microbatches=4)
    assert [plan.homes[str(index)] for index in range(4)] == [0, 1, 1, 1]


@pytest.mark.usefixtures("sleeping_is_work")
def test_work_that_estimates_see_is_not_timed() -> None:
    calls = []
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def step() -> Tensor:
        calls.append(1)
        return model(torch.ones(2, 8)).sum()  # type: ignore[no-any-return]  # modules return Any

    assert not capture(model, step).measured
    assert len(calls) == 1


def test_a_step_that_cannot_be_timed_is_estimated() -> None:
    model = nn.Sequential(Unseen(0.0, "function"), nn.Linear(8, 8))

    def step() -> Tensor:
        out: Tensor = model(torch.ones(2, 8))
        assert out.requires_grad
        return out.sum()

    assert not capture(model, step).measured


def test_operations_in_custom_functions_have_a_backward() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            return gradient, gradient

    class Multiplied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(x, self.weight)  # type: ignore[no-any-return]  # torch has no types there

    model = nn.Sequential(Multiplied(), Multiplied())
    trace = capture(model, lambda: model(torch.ones(2, 8)).sum())
    assert all(unit.backward_seconds > unit.forward_seconds for unit in trace.units)


@pytest.mark.usefixtures("sleeping_is_work")
def test_measured_times_replace_estimates() -> None:
    model = nn.Sequential(Unseen(0.001, "python"), Unseen(0.0005, "python"))
    trace = capture(model, lambda: model(torch.ones(2, 8)).sum(), times=True)
    assert trace.measured
    assert [unit.forward_seconds for unit in trace.units] == pytest.approx([0.001, 0.0005])
    assert not capture(model, lambda: model(torch.ones(2, 8)).sum()).measured


def test_flops_and_kept_activations_of_a_linear_layer_are_exact() -> None:
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False))
    for memory in (False, True):
        trace = capture(model, lambda: model(torch.ones(4, 16)).sum(), memory=memory)
        assert [unit.flops for unit in trace.units] == [2 * 4 * 16 * 32, 2 * 4 * 32 * 8]
        # each keeps its input
        assert [unit.activation_bytes for unit in trace.units] == [4 * 16 * 4, 4 * 32 * 4]
        assert [(edge.source, edge.target, edge.bytes) for edge in trace.edges] == [(0, 1, 4 * 32 * 4)]


def late(model: nn.Module, x: Tensor) -> list[tuple[int, int]]:
    """Bytes of inputs and of gradients that each unit keeps for late gradients of weights."""
    trace = capture(model, lambda: model(x).sum())
    for unit in trace.units:
        assert 0 <= unit.late_seconds < unit.backward_seconds
        assert bool(unit.late_seconds) is bool(unit.late_gradient_bytes)
    return [(unit.late_input_bytes, unit.late_gradient_bytes) for unit in trace.units]


def test_layers_whose_weights_can_wait_keep_inputs_and_gradients() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.left(x), self.right(x)], -1)

    class InBfloat16(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: Tensor = super().forward(x)
            return out

    x, leaf = torch.ones(2, 16), torch.ones(2, 16, requires_grad=True)
    linear = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    assert late(linear, x) == [(0, 0), (0, 0), (2 * 32 * 4, 2 * 8 * 4)]  # nothing is before the first
    assert late(linear, leaf)[0] == (2 * 16 * 4, 2 * 32 * 4)
    assert late(Shared(), leaf) == [(2 * 16 * 4, 2 * 8 * 4), (0, 2 * 4 * 4)]  # one input of two layers
    assert late(InBfloat16(*linear), leaf)[2] == (2 * 32 * 2, 2 * 8 * 2)
    image = torch.ones(2, 3, 8, 8, requires_grad=True)
    assert late(nn.Sequential(nn.Conv2d(3, 4, 3)), image) == [(2 * 3 * 64 * 4, 2 * 4 * 36 * 4)]
    linear[2].weight.requires_grad_(False)
    assert late(linear, leaf)[2] == (0, 0)
    assert late(nn.Sequential(nn.LayerNorm(16)), leaf) == [(0, 0)]


def test_layers_in_checkpoints_do_not_wait() -> None:
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.ones(4, 16, requires_grad=True)
    trace = capture(block, lambda: checkpoint(block, x, use_reentrant=False).sum())
    assert not any(unit.late_gradient_bytes for unit in trace.units)


def test_checkpointed_modules_keep_their_inputs_only() -> None:
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.ones(4, 16, requires_grad=True)
    plain = capture(block, lambda: block(x).sum())
    small = capture(block, lambda: checkpoint(block, x, use_reentrant=False).sum())
    kept = [sum(unit.activation_bytes for unit in trace.units) for trace in (plain, small)]
    assert kept[1] < kept[0] / 4


def test_a_weight_used_as_a_function_keeps_its_users_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(200, 16)
            self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])

        def forward(self, ids: Tensor) -> Tensor:
            features: Tensor = self.layers(self.embed(ids))
            return F.linear(features, self.embed.weight)

    model = Tied()
    trace = capture(model, lambda: model(torch.zeros(2, 3, dtype=torch.long)).sum())
    plan = partition(trace, 2, memory_weight=0.0)
    assert plan.homes["embed"] == plan.homes["layers.5"]


class Block(nn.Module):
    """A residual block whose gate's value is of interest to others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.gate = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x) * torch.sigmoid(self.gate(x))
        return out


@pytest.mark.parametrize("needs_value", [False, True])
def test_tensors_that_hooks_carry_past_modules_are_known(needs_value: bool) -> None:
    def escapes(hook: Any, result: Any = lambda out, kept: out) -> set[tuple[tuple[str, ...], str | None]]:
        model = nn.Sequential(Block(), Block())
        kept: list[Tensor] = []
        model[0].gate.register_forward_hook(lambda module, args, out: hook(kept, args, out))

        def call() -> Any:
            kept.clear()
            out = model(torch.ones(2, 4))
            return result(out, kept).sum().item() if needs_value else result(out, kept)

        trace = capture(model, call)
        assert trace.hooked == {"0.gate"}
        return {(tuple(sorted(escape.inside)), escape.around) for escape in trace.escapes}

    def keep(kept: list[Tensor], args: Any, out: Tensor) -> None:
        kept.append(out)

    def keep_mean(kept: list[Tensor], args: Any, out: Tensor) -> None:
        kept.append(out.detach().mean())

    past_all = {(("", "0"), None)}
    assert escapes(keep) == set()  # nobody looks
    assert escapes(lambda kept, args, out: None) == set()
    assert escapes(keep, lambda out, kept: out.sum() + kept[0].sum()) == past_all
    assert escapes(keep_mean, lambda out, kept: out.sum() + kept[0]) == past_all
    if not needs_value:
        assert escapes(keep, lambda out, kept: (out, kept)) == past_all


def test_modules_under_several_names_and_modules_called_twice_have_one_home() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.middle = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.again(self.middle(self.first(x)))
            return out

    model = Twice()
    trace = capture(model, lambda: model(torch.ones(2, 8)).sum())
    assert trace.aliases == {"again": "first"}
    assert trace.modules["first"].calls == 2
    plan = partition(trace, 2, memory_weight=0.0)
    assert plan.homes["first"] == plan.homes["again"]


def test_modules_that_share_a_block_of_code_are_cut_where_they_begin() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x * self.scale)
            return out + x

    model = nn.Sequential(Block(), Block())
    trace = capture(model, lambda: model(torch.ones(2, 8)).sum())
    assert trace.uses["1"] == trace.uses["1.inner"] == 1
    plan = partition(trace, 2, memory_weight=0.0)
    assert plan.atomic() == {"0": 0, "1": 1}


def test_compiled_modules_are_one_unit() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    compiled: Any = torch.compile(inner)
    model = nn.Sequential(nn.Linear(8, 8), compiled, nn.Linear(8, 8))
    trace = capture(model, lambda: model(torch.ones(2, 8)).sum())
    assert trace.modules["1"].opaque
    assert len(trace.units) == 3
    assert len({home for name, home in partition(trace, 3).homes.items() if name.startswith("1")}) == 1


class Averaged(nn.Module):
    """Weights that follow others as a moving average, in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
        self.teacher = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.student(x)
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)
            wanted: Tensor = self.teacher(x)
        return (out - wanted).square().mean()


def test_terms_of_weights_alone_keep_no_modules_together() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
    x = torch.ones(2, 32)
    plain = capture(model, lambda: model(x).sum())
    penalties: list[Callable[[], Any]] = [
        lambda: sum(parameter.square().sum() for parameter in model.parameters()),
        lambda: torch.stack([parameter.norm() for parameter in model.parameters()]).norm(),
        lambda: sum(
            parameter.abs().sum() for name, parameter in model.named_parameters() if "bias" not in name
        ),
    ]
    for penalty in penalties:
        trace = capture(model, lambda penalty=penalty: model(x).sum() + penalty())  # type: ignore[misc]
        assert trace.uses == plain.uses
        assert set(partition(trace, 3).homes.values()) == {0, 1, 2}
    averaged = Averaged()
    homes = partition(capture(averaged, lambda: averaged(x)), 2).homes
    assert {homes[f"student.{index}"] for index in range(4)} | {homes["teacher.3"]} == {0, 1}


def test_a_note_of_empty_stages_names_the_weights_that_keep_modules_together() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    model[2].weight = model[1].weight = model[0].weight
    (note,) = partition(capture(model, lambda: model(torch.ones(2, 8)).sum()), 2).notes
    assert "3 of the model's 3 parts use the same weights (0.weight)" in note


def test_scripted_modules_are_one_unit_with_their_costs() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(block), nn.Linear(8, 8))
    trace = capture(model, lambda: model(torch.ones(2, 8)).sum())
    assert [unit.module for unit in trace.units] == ["", "1", "2"]
    assert trace.modules["1"].opaque
    assert trace.units[1].flops == 2 * trace.units[2].flops


def test_a_step_that_never_calls_the_model_is_planned_by_sizes(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    trace = capture(model, lambda: torch.ones(()))
    assert "did not call the model" in caplog.text
    plan = partition(trace, 2)
    assert (plan.homes["0"], plan.homes["2"]) == (0, 1)
    assert set(describe(nn.Identity()).modules) == {""}


def test_lazy_modules_are_refused_with_a_way_out() -> None:
    with pytest.raises(ValueError, match="run the model once"):
        describe(nn.Sequential(nn.LazyLinear(4)))


def test_plans_are_the_same_every_time() -> None:
    plans = {partition(capture(*resnet(), has_data=False), 3).to_json() for _ in range(3)}
    assert len(plans) == 1


class CallsWhatIsInside(nn.Module):
    """Goes through the layers of a Sequential itself."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.gone_through = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x)
        for layer in self.gone_through:
            x = layer(x)
        return x


def test_a_module_whose_layers_others_call_is_a_list_of_them() -> None:
    model = CallsWhatIsInside()
    modules = capture(model, lambda: model(torch.ones(2, 3))).modules
    assert [name for name, info in modules.items() if info.container] == ["gone_through"]


def test_parameters_in_the_same_memory_are_shared_and_neighbours_in_it_are_not() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    tied[2].weight = nn.Parameter(tied[0].weight.detach())
    assert describe(tied).shared == (("0.weight", "2.weight"),)
    flat = torch.zeros(3 * 20)
    for layer, piece in zip(tied, flat.chunk(3), strict=True):
        layer.weight.data, layer.bias.data = piece[:16].view(4, 4), piece[16:]
    assert describe(tied).shared == ()
    tied[1].bias.data = flat[18:22]  # the last two of the first bias and the first two of its own weight
    assert describe(tied).shared == (("0.bias", "1.weight", "1.bias"),)


class Wrapped(nn.Module):
    """Has no length, unlike a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_a_dry_run_with_values_goes_through_compiled_modules() -> None:
    model = nn.Sequential(torch.compile(Wrapped(), backend="eager"), nn.Linear(4, 1))  # type: ignore[arg-type]

    def call() -> float:
        return model(torch.ones(2, 4)).sum().item()  # type: ignore[no-any-return]

    assert "1" in {unit.module for unit in capture(model, call).units}


def test_activations_that_layers_share_run_with_each_of_them() -> None:
    """On a stage of their own, all layers elsewhere would send their results there and back."""
    activation = nn.GELU()
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), activation)]
    model = nn.Sequential(*layers, nn.Sequential(nn.Linear(8, 8), activation))
    plan = partition(capture(model, lambda: model(torch.ones(2, 8)).sum()), 2)
    assert [crossing.tensors for crossing in plan.crossings] == [1]
    assert plan.atomic()["8"] == 1

"""Operations that are tried by themselves: which, when, and that nothing else is touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.dry_run.timing import operation_trials
from opensmd.modelparallel.dry_run.timing.operation_trials import COUNTED, OperationTrials
from opensmd.modelparallel.dry_run.timing.trial import BackwardTimer, Trial, Tried
from opensmd.modelparallel.planning.costs.cost import OperationCost, cost_of

aten = torch.ops.aten


def pictures(*more: nn.Module) -> tuple[nn.Sequential, list[int], Callable[[], Tensor]]:
    """A model of convolutions, a list that gets an item in each run of its step, and the step."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), *more, nn.Flatten(), nn.Linear(8 * 64, 4))
    runs: list[int] = []

    def step() -> Tensor:
        runs.append(1)
        return F.cross_entropy(model(torch.ones(2, 3, 8, 8)), torch.zeros(2, dtype=torch.long))

    return model, runs, step


def noted(
    func: torch._ops.OpOverload, *args: object, estimate: OperationCost | None = None
) -> OperationTrials:
    """Trials of one operation, in unit 5."""
    trials = OperationTrials(lambda tensor: False, lambda number: True)
    out = func(*args)
    cost = estimate or cost_of(func, args, {}, out, needs_gradient=True)
    trials.note(func, args, {}, out, 5, cost, 0)
    return trials


def test_convolutions_are_timed_without_running_the_step_again() -> None:
    model, runs, step = pictures()
    assert not capture(model, step).measured
    runs.clear()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trace = capture(model, step, operations=True)
    assert trace.measured and len(runs) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    trained = [unit for unit in trace.units if unit.module in ("", "0", "1", "3", "5")]
    assert trained and all(unit.forward_seconds > 0 and unit.backward_seconds > 0 for unit in trained)
    assert all(0 <= unit.late_seconds <= unit.backward_seconds for unit in trace.units)


def test_layers_that_are_alike_take_as_long() -> None:
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)]
    model = nn.Sequential(*layers)
    x = torch.ones(2, 8, 8, 8, requires_grad=True)
    trace = capture(model, lambda: model(x).sum(), operations=True)
    assert trace.measured
    assert len({unit.forward_seconds for unit in trace.units[:-1]}) == 1
    assert len({unit.backward_seconds for unit in trace.units[:-1]}) == 1


def test_nothing_is_tried_where_a_cut_decides_which_random_numbers_are_drawn() -> None:
    model, _, step = pictures(nn.Dropout(0.5))
    assert not capture(model, step, operations=True).measured
    model.eval()
    assert capture(model, step, operations=True).measured


class Attention(nn.Module):
    """Attends over the places of a picture."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        places = x.flatten(2).transpose(1, 2).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(places, places, places, dropout_p=self.dropout)
        return mixed.squeeze(1).transpose(1, 2).reshape_as(x)


def test_fused_attention_without_dropout_draws_no_random_numbers() -> None:
    model, _, step = pictures(Attention(0.0))
    assert capture(model, step, operations=True).measured
    model, _, step = pictures(Attention(0.5))
    assert not capture(model, step, operations=True).measured
    query = torch.ones(1, 1, 4, 8, requires_grad=True)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not noted(attention, query, query, query).draws
    assert not noted(attention, query, query, query, 0.0, True).draws


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_nothing_is_tried_where_runs_shall_be_alike() -> None:
    model, _, step = pictures()
    assert not capture(model, step, operations=True).measured


def test_nothing_is_tried_where_estimates_can_be_trusted_or_there_is_no_data() -> None:
    linear = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    assert not capture(linear, lambda: linear(torch.ones(8, 64)).sum(), operations=True).measured
    model, _, step = pictures()
    assert not capture(model, step, operations=True, has_data=False).measured


def test_the_calling_threads_modes_reach_no_trial() -> None:
    model, _, step = pictures()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert capture(model, step, operations=True).measured
        assert torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
    with torch.inference_mode():
        assert capture(model, step, times=True).measured  # whose backward, which it has not, is tried


def test_an_operation_that_needs_too_much_memory_or_is_refused_counts_as_estimated() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    assert noted(aten.mm.default, x, x).seconds(most_bytes=1000) is None
    estimate = OperationCost(forward_seconds=1.0, backward_seconds=1.0)
    symmetric = torch.eye(8, requires_grad=True)  # which made-up numbers are not
    trials = noted(aten.linalg_cholesky_ex.default, symmetric, estimate=estimate)
    trials.note(aten.mm.default, (x, x), {}, x @ x, 6, estimate, 0)
    looked_up = torch.zeros(2, dtype=torch.long)
    trials.note(aten.embedding.default, (x, looked_up), {}, x[:2], 7, estimate, 0)
    found = trials.seconds(most_bytes=1e9)
    assert found is not None and found.backward is not None
    assert found.forward[6] != 1.0 and found.backward[6] != 1.0
    assert found.forward[7] == found.backward[7]  # as estimated, at this machine's pace


def test_written_in_place_and_broadcast_tensors_can_be_made_up() -> None:
    x = torch.ones(8, 16, requires_grad=True)
    for func, args in (
        (aten.relu_.default, (x.clone(),)),
        (aten.mul.Tensor, (x, torch.ones(1, 16).expand(8, 16))),
        (aten.cat.default, ([x, x.t().reshape(8, 16)],)),
    ):
        found = noted(func, *args).seconds(most_bytes=1e9)
        # So small that nothing may be left of what was measured; but it was tried.
        assert found is not None and found.backward is not None
        assert found.forward.keys() == found.backward.keys() == {5}


@pytest.mark.parametrize("together", [True, False])
def test_forwards_of_as_many_as_fit_come_before_their_backwards(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    x = torch.ones(8, 16, requires_grad=True)
    trials = noted(aten.exp.default, x)
    trials.note(aten.sin.default, (x,), {}, x, 6, OperationCost(forward_seconds=1e-6), 1)
    ran: list[str] = []
    forward, backward = Trial.forward, Trial.backward

    def noting_forward(trial: Trial, engine: BackwardTimer) -> None:
        ran.append(f"{trial.operation.func.overloadpacket.__name__} forward")
        forward(trial, engine)

    def noting_backward(trial: Trial, engine: BackwardTimer) -> Tried:
        ran.append(f"{trial.operation.func.overloadpacket.__name__} backward")
        return backward(trial, engine)

    # Else a trial during which something else runs may be the last of its operation.
    monkeypatch.setattr(operation_trials, "LONG_SECONDS", math.inf)
    monkeypatch.setattr(Trial, "forward", noting_forward)
    monkeypatch.setattr(Trial, "backward", noting_backward)
    of_one = 2 * 2 * 4 * x.numel()
    assert trials.seconds(most_bytes=2 * of_one if together else of_one) is not None
    rounds = COUNTED + 1
    if together:
        assert ran == ["exp forward", "sin forward", "sin backward", "exp backward"] * rounds
    else:
        assert ran == ["exp forward", "exp backward"] * rounds + ["sin forward", "sin backward"] * rounds

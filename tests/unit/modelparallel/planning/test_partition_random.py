"""Properties of plans for random models: nested, with residuals, reused modules and tied weights."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.planning.partition import partition
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.saved_places import saved_places
from opensmd.modelparallel.planning.schedules.tables import in_a_v

WIDTH = 8


class Residual(nn.Module):
    """A body beside a shortcut, with a parameter of its own."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x * self.gain)
        return x + out


def draw_model(draw: random.Random, depth: int, pool: list[nn.Module]) -> nn.Module:
    """A random module that maps WIDTH features to WIDTH features."""
    kind = draw.random()
    if depth == 0 or kind < 0.3:
        leaf: nn.Module = draw.choice([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Dropout()])
        if isinstance(leaf, nn.Linear):
            earlier = [one for one in pool if isinstance(one, nn.Linear)]
            if earlier and draw.random() < 0.2:
                leaf.weight = draw.choice(earlier).weight
            pool.append(leaf)
        return leaf
    if kind < 0.4 and pool:
        return draw.choice(pool)  # used again
    if kind < 0.6:
        return Residual(draw_model(draw, depth - 1, pool))
    return nn.Sequential(*[draw_model(draw, depth - 1, pool) for _ in range(draw.randint(1, 4))])


def check_plan(plan: Plan, model: nn.Module) -> None:
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    assert sorted(plan.homes) == sorted(names)
    homes: dict[nn.Module, set[int]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        homes.setdefault(module, set()).add(plan.homes[name])
    assert all(len(found) == 1 for found in homes.values()), "one module object, one home"
    places: dict[int, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), set()).add(plan.parameter_home(name))
    assert all(len(found) == 1 for found in places.values()), "one tensor, one home"
    covered = [
        name for name in names if sum(f"{name}.".startswith(f"{a}.") or a == "" for a in plan.atomic()) == 1
    ]
    assert set(covered) | plan.split() == set(names), (
        "atomic subtrees are disjoint and cover what is not split"
    )
    assert sum(row.parameters for row in plan.rows) == sum(p.numel() for p in model.parameters())


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0]))
def test_plans_of_random_models_place_everything_once(seed: int, stages: int, weight: float) -> None:
    draw = random.Random(seed)
    pool: list[nn.Module] = []
    model = nn.Sequential(*[draw_model(draw, 3, pool) for _ in range(3)])
    trace = capture(model, lambda: model(torch.ones(2, WIDTH)).sum())
    plan = partition(trace, stages, memory_weight=weight)
    check_plan(plan, model)
    assert Plan.from_json(plan.to_json()) == plan
    predicted = sum(load.seconds for load in plan.loads)
    total = sum(unit.forward_seconds + unit.backward_seconds for unit in trace.units)
    assert predicted == pytest.approx(total)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(2, 4))
def test_random_fixed_places_are_kept(seed: int, stages: int) -> None:
    draw = random.Random(seed)
    pool: list[nn.Module] = []
    model = nn.Sequential(*[draw_model(draw, 2, pool) for _ in range(4)])
    trace = capture(model, lambda: model(torch.ones(2, WIDTH)).sum())
    owners = {trace.owner(name) for names in trace.shared for name in names}
    free = [name for name in trace.modules if name and name not in owners]
    fixed = {name: draw.randrange(stages) for name in draw.sample(free, min(2, len(free)))}
    plan = partition(trace, stages, fixed=fixed)
    check_plan(plan, model)
    for name, stage in fixed.items():
        assert plan.homes[name] == stage


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(2, 4), st.booleans())
def test_parameters_stay_where_a_checkpoint_has_them_whatever_times_say(
    seed: int, stages: int, in_v: bool
) -> None:
    draw = random.Random(seed)
    pool: list[nn.Module] = []
    model = nn.Sequential(*[draw_model(draw, 3, pool) for _ in range(4)])
    trace = capture(model, lambda: model(torch.ones(2, WIDTH)).sum())
    units = tuple(replace(unit, forward_seconds=draw.random()) for unit in trace.units)
    layout = in_a_v(stages) if in_v else None
    before = partition(replace(trace, units=units), stages, virtual_stages=layout)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    by_stage = [[name for name in names if before.parameter_home(name) == stage] for stage in range(stages)]
    by_stage[0].append("renamed.by.a.hook")
    after = partition(trace, stages, saved=saved_places(by_stage), virtual_stages=layout)
    check_plan(after, model)
    assert {name: after.parameter_home(name) for name in names} == {
        name: before.parameter_home(name) for name in names
    }

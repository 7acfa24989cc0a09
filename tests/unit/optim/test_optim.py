"""The fused optimizers against plain writings of their published update rules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opensmd.optim import FusedAdam, FusedLAMB, FusedNovoGrad
from tests.unit.optim.parameters import gradients, parameters


def run(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 5) -> list[Tensor]:
    params = parameters()
    made = optimizer(params)
    for step in range(steps):
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad.clone()
        made.step()
        made.zero_grad()
    assert all(param.grad is None for param in params)
    return [param.detach() for param in params]


def lamb_by_hand(
    *, lr: float, decay: float, bias: bool, averaging: bool, limit: float, nvlamb: bool, w_mode: bool
) -> list[Tensor]:
    b1, b2, eps = 0.9, 0.999, 1e-6
    params = [p.detach().clone() for p in parameters()]
    m, v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    for t in range(1, 6):
        grads = gradients(t - 1)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            if limit and norm > limit:
                g = g * (limit / norm)
            if not w_mode:
                g = g + decay * p
            m[i] = b1 * m[i] + ((1 - b1) if averaging else 1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
            u = (m[i] / (1 - b1**t if bias else 1)) / ((v[i] / (1 - b2**t if bias else 1)).sqrt() + eps)
            if w_mode:
                u = u + decay * p
            ratio = 1.0
            if (decay or nvlamb) and p.norm() > 0 and u.norm() > 0:
                ratio = float(p.norm() / u.norm())
            params[i] = p - lr * ratio * u
    return params


def novograd_by_hand(
    *, lr: float, decay: float, bias: bool, averaging: bool, inside: bool, zero: bool, order: int
) -> list[Tensor]:
    b1, b2, eps = 0.95, 0.98, 1e-8
    params = [p.detach().clone() for p in parameters()]
    m: list[Any] = [torch.zeros_like(p) for p in params]
    n: list[Any] = [None] * len(params)
    for t in range(1, 6):
        for i, (p, g) in enumerate(zip(params, gradients(t - 1), strict=True)):
            size = g.norm() if order == 2 else g.abs().max()
            old = (torch.zeros(()) if zero else size) if n[i] is None else n[i]
            n[i] = (b2 * old**2 + (1 - b2) * size**2).sqrt() if order == 2 else b2 * old + (1 - b2) * size
            divisor = n[i] / ((1 - b2**t) ** 0.5 if bias else 1) + eps
            weight = (1 - b1) if averaging else 1
            if inside:
                m[i] = b1 * m[i] + weight * (g / divisor + decay * p)
                u = m[i] / (1 - b1**t if bias else 1)
            else:
                m[i] = b1 * m[i] + weight * g
                u = m[i] / (1 - b1**t if bias else 1) / divisor + decay * p
            params[i] = p - lr * u
    return params


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("bias", "averaging", "limit"), [(True, True, 1.0), (False, False, 0.0), (True, False, 1e9)]
)
@pytest.mark.parametrize(("nvlamb", "w_mode"), [(False, True), (True, False)])
def test_lamb_follows_the_published_rule(
    decay: float, bias: bool, averaging: bool, limit: float, nvlamb: bool, w_mode: bool
) -> None:
    found = run(
        lambda params: FusedLAMB(
            params,
            lr=0.02,
            weight_decay=decay,
            bias_correction=bias,
            grad_averaging=averaging,
            max_grad_norm=limit,
            use_nvlamb=nvlamb,
            adam_w_mode=w_mode,
        )
    )
    expected = lamb_by_hand(
        lr=0.02, decay=decay, bias=bias, averaging=averaging, limit=limit, nvlamb=nvlamb, w_mode=w_mode
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("bias", "averaging", "zero"), [(True, True, False), (False, False, True), (True, False, True)]
)
@pytest.mark.parametrize(
    ("inside", "order", "decay"), [(True, 2, 0.1), (False, 2, 0.0), (False, 0, 0.1), (True, 0, 0.1)]
)
def test_novograd_follows_the_published_rule(
    bias: bool, averaging: bool, zero: bool, inside: bool, order: int, decay: float
) -> None:
    found = run(
        lambda params: FusedNovoGrad(
            params,
            lr=0.02,
            betas=(0.95, 0.98),
            weight_decay=decay,
            bias_correction=bias,
            grad_averaging=averaging,
            reg_inside_moment=inside,
            init_zero=zero,
            norm_type=order,
        )
    )
    expected = novograd_by_hand(
        lr=0.02, decay=decay, bias=bias, averaging=averaging, inside=inside, zero=zero, order=order
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_equals_torchs_adam_and_adamw(decay: float) -> None:
    for w_mode, reference in [(True, torch.optim.AdamW), (False, torch.optim.Adam)]:
        found = run(lambda params: FusedAdam(params, lr=0.02, weight_decay=decay, adam_w_mode=w_mode))  # noqa: B023
        expected = run(lambda params: reference(params, lr=0.02, weight_decay=decay))  # noqa: B023
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedNovoGrad])
def test_state_survives_saving_half_precision_learns_and_schedulers_work(kind: Any) -> None:
    params = parameters()
    one = kind(params, lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5)
    for step in range(2):
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad.clone()
        one.step()
    scheduler.step()
    assert one.param_groups[0]["lr"] == 0.01
    clones = [nn.Parameter(param.detach().clone()) for param in params]
    two = kind(clones, lr=0.02)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for param, clone, grad in zip(params, clones, gradients(2), strict=True):
        param.grad, clone.grad = grad.clone(), grad.clone()
    one.step()
    two.step()
    assert all(torch.equal(param, clone) for param, clone in zip(params, clones, strict=True))
    half = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    half.grad = torch.full_like(half, 0.3)
    learning = kind([half], lr=1.0)
    learning.step()
    assert half.dtype == torch.bfloat16 and bool((half < 1).all())
    resumed = kind([half], lr=1.0)
    resumed.load_state_dict(learning.state_dict())
    torch.testing.assert_close(resumed.state[half], learning.state[half], rtol=0, atol=0)  # of float32
    resumed.step()


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedNovoGrad])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_train_on_alike(kind: Any, copied: Callable[[Any], Any]) -> None:
    made = kind(parameters(), lr=0.1)
    again = copied(made)
    for step in range(2):
        for each in (made, again):
            for param, grad in zip(each.param_groups[0]["params"], gradients(step), strict=True):
                param.grad = grad.clone()
            each.step()
            each.zero_grad()
    for one, other in zip(made.param_groups[0]["params"], again.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other) and one.grad is other.grad is None


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedNovoGrad])
def test_settings_that_have_no_rule_are_refused(kind: Any) -> None:
    with pytest.raises(RuntimeError, match="no AMSGrad variant"):
        kind(parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="betas="):
        kind(parameters(), betas=(1.0, 0.9))
    with pytest.raises(ValueError, match="must not be negative"):
        kind(parameters(), lr=-1.0)
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not take sparse gradients"):
        kind(sparse.parameters()).step()

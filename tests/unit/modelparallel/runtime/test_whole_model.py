"""Steps of a model in one partition: its microbatches in turn, and what replicas hear of backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opensmd.modelparallel.replicas.backward_count import Backwards
from opensmd.modelparallel.runtime.backward.sum_warning import SumWarning
from opensmd.modelparallel.runtime.whole_model import WholeModel


@dataclass
class Result:
    """What a step returns, with tensors somewhere inside."""

    name: str
    tensors: dict[str, list[Tensor]]


class Listening:
    """Replicas that write down what they are told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def before_last_backward(self, roots: Sequence[Tensor]) -> None:
        self.heard.append("last")

    def after_backward(self) -> None:
        self.heard.append("after")


def run(step: Callable[[WholeModel, Tensor], Any], microbatches: int = 2) -> tuple[list[Any], list[str], int]:
    """The results of a step over so many inputs, what replicas have heard, and how often it went backward."""
    layer, replicas, backwards = nn.Linear(1, 1), Listening(), Backwards(microbatches)
    model = WholeModel(layer, SumWarning(is_due=False), is_sharded=False)
    model.reducer = replicas
    calls = [((model, layer(torch.full((1,), float(number)))), {}) for number in range(microbatches)]
    results = model.run(step, calls, detach=True, backwards=backwards)
    return results, replicas.heard, backwards.total


def test_microbatches_run_in_turn_and_replicas_reduce_in_the_last_backward() -> None:
    def step(model: WholeModel, out: Tensor) -> Result:
        model.backward(out.sum(), None, None, share=0.5)
        return Result("a", {"each": [out]})

    results, heard, count = run(step)
    assert [result.tensors["each"][0].requires_grad for result in results] == [False, False]
    assert heard == ["after", "last", "after"] and count == 2


def test_torchs_own_backward_counts_like_the_models() -> None:
    _, heard, count = run(lambda model, out: out.sum().backward())
    assert heard == ["after", "last", "after"] and count == 2


def test_a_backward_that_does_not_reach_the_model_is_nobodys_business() -> None:
    _, heard, count = run(lambda model, out: torch.ones(1, requires_grad=True).sum().backward())
    assert heard == [] and count == 0


def test_the_backward_inside_a_reentrant_checkpoint_belongs_to_the_one_around_it() -> None:
    def step(model: WholeModel, out: Tensor) -> None:
        checkpoint(torch.sin, out, use_reentrant=True).sum().backward()

    _, heard, count = run(step, microbatches=1)
    assert heard == ["last", "after"] and count == 1


def test_after_the_step_backwards_are_torchs_own_again() -> None:
    plain = torch.autograd.backward
    with pytest.raises(ZeroDivisionError):
        run(lambda model, out: 1 // 0)
    assert torch.autograd.backward is plain

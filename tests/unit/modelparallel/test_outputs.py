"""What a step returns."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from opensmd.modelparallel.outputs import StepOutput, merge_results


class Output(OrderedDict[str, Any]):
    """A dict subclass, as Hugging Face's ModelOutput."""


def test_step_output_reduces_joins_and_detaches() -> None:
    output = StepOutput([torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 6.0])])
    assert output.reduce_mean().tolist() == [2.0, 4.0]
    assert output.reduce_sum().tolist() == [4.0, 8.0]
    assert output.concat().tolist() == [1.0, 2.0, 3.0, 6.0]
    assert output.stack().tolist() == [[1.0, 2.0], [3.0, 6.0]]
    assert isinstance(output.detach(), StepOutput)
    assert not output.detach().concat().requires_grad and output.concat().requires_grad


def test_who_takes_a_step_output_for_a_tensor_is_told_what_to_do() -> None:
    loss: Any = StepOutput([torch.tensor(1.0)])
    with pytest.raises(AttributeError, match=r"no attribute 'item': .*reduce_mean\(\)"):
        loss.item()
    with pytest.raises(AttributeError, match=r"call model.backward\(loss\) inside the smp.step function"):
        loss.backward()
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = loss.nothing
    calls: list[Callable[[], Any]] = [
        lambda: loss + 1.0,
        lambda: 0.0 + loss,
        lambda: loss / 2,
        lambda: loss < 3,
        lambda: float(loss),
        lambda: f"{loss:.3f}",
        lambda: loss[0],
        lambda: torch.argmax(loss, 0),
        lambda: torch.ones(1) + loss,
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"StepOutput.*one tensor for each microbatch.*reduce_mean\(\)"):
            call()
    assert loss and loss == loss and f"{loss}" == str(loss) == repr(loss)
    assert pickle.loads(pickle.dumps(loss)).outputs == copy.deepcopy(loss).outputs == loss.outputs


def test_losses_without_axes_concatenate_to_a_vector() -> None:
    output = StepOutput([torch.tensor(1.0), torch.tensor(3.0)])
    assert output.concat().tolist() == [1.0, 3.0]
    assert output.reduce_mean().item() == 2.0


def test_results_keep_their_structure_and_classes() -> None:
    def result(i: int) -> Any:
        tensor = torch.tensor([float(i)])
        return Output(loss=tensor, rest=(tensor, [i, "x"])), {"n": i}

    merged = merge_results([result(0), result(1)])
    assert type(merged) is tuple and type(merged[0]) is Output
    assert merged[0]["loss"].concat().tolist() == [0.0, 1.0]
    assert merged[0]["rest"][0].outputs[1].item() == 1.0
    assert merged[0]["rest"][1] == [[0, 1], ["x", "x"]]
    assert merged[1] == {"n": [0, 1]}
    assert merge_results([None, None]) == [None, None]
    assert merge_results([torch.zeros(2, 3).shape, torch.zeros(2, 3).shape]) == [(2, 3), (2, 3)]
    assert merge_results([0.5, 0.25]) == [0.5, 0.25]


def test_microbatches_with_different_structures_are_refused() -> None:
    with pytest.raises(ValueError, match="length 2 in microbatch 0, 1 in microbatch 1"):
        merge_results([(1, 2), (1,)])
    with pytest.raises(ValueError, match="differs between microbatches: Tensor, int"):
        merge_results([torch.zeros(1), 1])
